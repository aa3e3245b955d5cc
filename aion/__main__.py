"""The program ``aion``: starts the command line, or prints what is missing in the installation."""

from __future__ import annotations

import sys

from aion.errors import MissingExtra, ShadowedPackage


def main() -> None:
    """The console script. If the installation is incomplete, prints why and exits with code 2."""
    try:
        from aion.cli import app
    except (MissingExtra, ShadowedPackage) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
