"""What a section of a policy is: a frozen model whose fields adapt to those that the user set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError


class Contradiction(NamedTuple):
    """A mistake in several keys of one section. ``text`` is about the first of them."""

    text: str
    keys: tuple[str, ...]


def _key(field: str) -> str:
    """Returns the key in a policy file: the name of the field without its unit."""
    return re.sub("_(bytes|us|bytes_per_s)$", "", field)


class Section(BaseModel):
    """A section of the policy. Fields that the user did not set adapt to those that he set: see ``_adapted``.

    A value counts as set if the user wrote it, not if a preset or a default has it. ``model_fields_set`` holds these
    fields. :mod:`aion.config.layers` passes them as the validation context: by section, the names of the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=_key)

    @model_validator(mode="before")
    @classmethod
    def _all_commented_out(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _adapt_what_is_not_set(self, info: ValidationInfo) -> Self:
        if info.context is not None:
            object.__setattr__(self, "__pydantic_fields_set__", set(info.context.get(type(self), ())))
        adapted = self._adapted()
        assert not adapted.keys() & self.model_fields_set, "a value that the user set was changed"
        self.__dict__.update(adapted)
        if found := list(self._contradictions()):
            raise PydanticCustomError("across", "{text}", {"text": "; ".join(c.text for c in found), "found": found})
        return self

    @classmethod
    def written(cls) -> dict[str, str]:
        """Returns the key in a policy file, by field name."""
        return {name: field.alias or name for name, field in cls.model_fields.items()}

    def _adapted(self) -> dict[str, Any]:
        """New values for fields that the user did not set, so that they agree with those that he set."""
        return {}

    def _contradictions(self) -> Iterator[Contradiction]:
        """Returns values that the user set and that contradict each other."""
        return iter(())
