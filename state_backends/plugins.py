"""Makes a user's own policy from the name of its class, which it imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from state_backends.format.errors import PolicyError


def build(class_path: str, arguments: Mapping[str, Any], *, methods: Sequence[str]) -> Any:
    """Imports ``package.module:Class`` and calls it with the arguments. The result must have these methods.

    Raises PolicyError if the class cannot be imported, refuses the arguments, or lacks a method. The message names the
    class, the problem, and what would be right.
    """
    module, _, name = class_path.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the user's module may raise anything when it is imported
        advice = "write package.module:Class, and install it for the Python of every executor"
        raise PolicyError(f"{class_path} cannot be imported ({type(error).__name__}: {error}); {advice}") from error
    try:
        made = found(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
        raise PolicyError(f"{class_path} cannot be made with {given} ({type(error).__name__}: {error})") from error
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        raise PolicyError(f"{class_path} is no policy of this kind: it lacks {', '.join(missing)}()")
    return made
