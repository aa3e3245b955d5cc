"""Whether all that Aion needs is installed: its own packages, and the packages of extras."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from aion.errors import EXTRAS, ShadowedPackage, needs_extra

HOME = Path(__file__).parent.parent
"""All our packages lie beside each other: in a checkout, in an installation, in a zip file."""


def check_packages(*names: str) -> None:
    """Raises ShadowedPackage, an ImportError, for a package that is not ours or is not there."""
    for name in names:
        ours, found = HOME / name / "__init__.py", _place(name)
        if found is None:
            raise ShadowedPackage(f"{ours} is not there: a part of Aion is not installed; install it again")
        if found != ours and found.resolve() != ours.resolve():
            raise ShadowedPackage(
                f"{found} shadows Aion's own package {name!r} ({ours}), because Python finds it first: "
                "rename it, or take its folder off sys.path (PYTHONPATH)"
            )


def require_extra(extra: str, what: str) -> None:
    """Raises MissingExtra now rather than hours later. Imports nothing, because some packages are slow to import."""
    with needs_extra(extra, what):
        for module in EXTRAS[extra]:
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)


def _place(name: str) -> Path | None:
    """The file that an import of this name runs, or ran; a folder if it is one without ``__init__.py``."""
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
