"""Checks that Aion's own packages, and the packages of extras, are installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).parent.parent
"""The folder of all our packages. They are side by side in a checkout, in an installation, and in a zip file."""


def check_packages(*names: str) -> None:
    """Raises ShadowedPackage, an ImportError, if one of our packages is missing or another module hides it.

    If that package is ``state_backends``, it is a plain ImportError: all errors of Aion have their base there.
    """
    for name in names:
        ours, found = HOME / name / "__init__.py", _place(name)
        if found is None:
            raise _import_error(f"{ours} is missing: Aion is not installed completely; install it again")
        if found != ours and found.resolve() != ours.resolve():
            raise _import_error(
                f"{found} shadows Aion's own package {name!r} ({ours}), because Python finds it first: "
                "rename it, or remove its folder from sys.path (PYTHONPATH)"
            )


def has_experiments() -> bool:
    """Returns whether this is a checkout, which has the experiments. Raises ShadowedPackage if another module hides
    them.
    """
    if not (HOME / "experiments" / "__init__.py").is_file():
        return False
    check_packages("experiments")
    return True


def check_experiments(what: str) -> None:
    """Raises ConfigError if there are no experiments."""
    if not has_experiments():
        from aion.errors import ConfigError

        raise ConfigError(
            f"{what} needs the experiments, which are in a checkout of Aion and not in what pip installs: clone its "
            "repository, and run this command there"
        )


def require_extra(extra: str, what: str) -> None:
    """Raises MissingExtra if a package of the extra is missing, so that a query fails now and not hours later.

    Imports nothing, because some packages are slow to import.
    """
    from aion.errors import EXTRAS, needs_extra

    with needs_extra(extra, what):
        for module in EXTRAS[extra]:
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)


def _import_error(message: str) -> ImportError:
    try:
        from aion.errors import ShadowedPackage
    except ImportError:
        return ImportError(message)
    return ShadowedPackage(message)


def _place(name: str) -> Path | None:
    """Returns the file that Python loads for this name, or the folder of a package without ``__init__.py``; None if
    missing.
    """
    if name in sys.modules:
        module = sys.modules[name]
        file, folders = module.__file__, getattr(module, "__path__", ())
    else:
        spec = find_spec(name)
        if spec is None:
            return None
        file, folders = spec.origin, spec.submodule_search_locations or ()
    found = file or next(iter(folders), None)
    return Path(found) if found is not None else None
