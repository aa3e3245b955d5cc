"""A policy class of the user's own, as a policy file names it: the class and its keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import yaml

from aion.config.values import NULL, Refused, Written, show, text_of
from aion.errors import ConfigError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_CLASS_PATH = rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*"


class Arguments(Mapping[str, Any]):
    """Keyword arguments whose values JSON can hold. Immutable, so that a policy can be hashed and sent to executors.

    Raises ConfigError for a name that is not a Python identifier, or a value that JSON cannot hold.
    """

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[Any, Any] | None = None) -> None:
        for name in values or {}:
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"{show(name)} is not an argument name; write e.g. 'limit: 5'")
        try:
            self._text = json.dumps(dict(values or {}), sort_keys=True, allow_nan=False, default=_bare)
        except (TypeError, ValueError, RecursionError) as error:
            allowed = "text, numbers, true, false, null, and lists and mappings of them"
            raise ConfigError(f"{show(values)} cannot be sent to executors ({error}); write {allowed}") from None

    def __getitem__(self, name: str) -> Any:
        return json.loads(self._text)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(json.loads(self._text))

    def __len__(self) -> int:
        return len(json.loads(self._text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arguments) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"Arguments({self._text})"


def _bare(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{show(value)} is a {type(value).__name__}")


def _arguments(value: Any) -> Arguments:
    if isinstance(value, str):  # from Spark's configuration: JSON, otherwise YAML
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            with suppress(yaml.YAMLError, ValueError, RecursionError):
                value = yaml.safe_load(value)
    if value is not None and not isinstance(value, Mapping):
        raise Refused
    return value if isinstance(value, Arguments) else Arguments(value)


ClassPath = Annotated[str | None, text_of(_CLASS_PATH, "package.module:Class") | NULL]
ArgumentsValue = Annotated[
    Arguments, Written(_arguments, "a mapping of names to values, such as {limit: 5}", ({"type": "object"},), dict)
]
