"""The program ``aion``: the command line, or one clear sentence on what it lacks."""

from __future__ import annotations

import sys

from aion.errors import MissingExtra, ShadowedPackage


def main() -> None:
    """The console script. Exit code 2 for an error of the user's, with one clear message."""
    try:
        from aion.cli import app
    except (MissingExtra, ShadowedPackage) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
