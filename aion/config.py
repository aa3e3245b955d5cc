"""The policy: what is kept where, for how long, and what runs when. Its only effect is to read files.

A YAML file has the shape of :class:`Policy` by alias (``memory: {budget: 512MiB}``); the Python attributes
carry their unit (``policy.memory.budget_bytes``). JSON schema and :func:`describe` come from the fields.
Order of precedence: keyword, Spark conf, YAML, default.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import reduce
from importlib import resources
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from aion.errors import ConfigError, PolicyError
from aion.time import duration_us, format_duration

SPARK_PREFIX = "spark.aion."
_MAX_BOUND_US = 3_652_500 * 86_400_000_000  # 10,000 years: a window's end plus it stays inside of 64 bits
_MAX_BLOCK_BYTES = 1 << 30  # one value of a Spark row ends at 2 GiB, and blocks overshoot their target
_SIZE = re.compile(r"\s*([+-]?\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for base, tail in ((1024, "ib"), (1000, "b"))
    for power, letter in enumerate("kmgt", start=1)
}
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def _show(value: object) -> str:
    """The value as YAML spells it, cut to a length that fits a line."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value)) or _repr.repr(value)


def size_bytes(value: object, *, what: str = "size") -> int:
    """Bytes of ``"512MiB"``, ``"1.5 GB"``, ``"4096"`` or an int; a fraction of a byte is cut off.

    Raises ConfigError naming ``what`` for anything else, and for less than 1 byte.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    part = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if part is None or ("." in part[1] and not part[2]):
        raise ConfigError(f"{what}: {_show(value)} is no size; write e.g. '64MiB', or a number of bytes")
    number, unit = part.groups()
    if unit.lower() not in _SIZE_UNITS:
        # Spark's own sizes ('512m') are binary: whoever writes one is told its spelling here.
        spark = f"'{text}' of Spark is '{number}{unit.upper()}iB' here; " if unit.lower() in "kmgt" else ""
        raise ConfigError(
            f"{what}: {_show(value)} has the unknown unit {unit!r}; "
            f"{spark}units are B, KiB MiB GiB TiB (1024) and KB MB GB TB (1000)"
        )
    size = int(Decimal(number) * _SIZE_UNITS[unit.lower()])
    if not 1 <= size < 1 << 63:
        raise ConfigError(f"{what}: {_show(value)} is out of range; a size is at least 1 byte, e.g. '64MiB'")
    return size


def format_bytes(size: int) -> str:
    """The shortest exact spelling that :func:`size_bytes` reads back: ``67108864`` -> ``"64MiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


# -- the types of the leaves --------------------------------------------------------------------------


class _FileNumber(int):
    """An integer that stood in a YAML file, where a number without unit is no duration."""


def _block_size(size: int) -> int:
    if size > _MAX_BLOCK_BYTES:
        raise ConfigError(f"{format_bytes(size)} is too large for a row of Spark; write at most '1GiB'")
    return size


def _bound(value: Any) -> int:
    try:
        bound_us = duration_us(value)
    except OverflowError:  # a fraction with more digits than a float can hold
        bound_us = _MAX_BOUND_US + 1
    if bound_us < 0:
        raise ConfigError(f"{_show(value)} is negative; write 0 or more, e.g. '10m'")
    if bound_us > _MAX_BOUND_US:
        raise ConfigError(f"{_show(value)} is too long; write at most '3652500 days'")
    if bound_us and isinstance(value, _FileNumber):
        raise ConfigError(f"{value} has no unit; write e.g. '{value}s' or '{value}m'")
    return bound_us


def _shard_count(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value  # Spark conf: strings
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return int(number)
    if value != "auto":
        raise ConfigError(f"{_show(value)} is no number of shards; write 'auto' or an integer from 1")
    return value


def _location(value: object) -> object:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is not None and (not isinstance(text, str) or not text.strip()):
        raise ConfigError(f"{_show(value)} is no location; write a path, a URI ('s3://...') or null")
    return text


_SIZE_TEXT = {"type": "string", "pattern": r"^\s*[0-9]+(\s*|(\.[0-9]+)?\s*([KkMmGgTt][Ii]?)?[Bb]\s*)$"}
_BOUND_TEXT = {"type": "string", "pattern": r"^(\s*[0-9]+(\.[0-9]+)?\s*[A-Za-z]+\s*)+$"}
# The string at the end of an annotation is the type in a user's words; describe() shows it.
Size = Annotated[
    int,
    BeforeValidator(lambda value: size_bytes(value)),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT]}),
    "size such as 64MiB, 1GiB or 10MB, or a number of bytes",
]
Bound = Annotated[
    int,
    BeforeValidator(_bound),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"anyOf": [{"const": 0}, _BOUND_TEXT]}),
    "duration with its unit such as 90s, 10m or 3 days, or 0",
]
Shards = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_shard_count),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
    "auto, or an integer from 1",
]
Location = Annotated[str | None, BeforeValidator(_location), "path, URI, or null"]


# -- the model ----------------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _all_commented_out(cls, value: object) -> object:
        return {} if value is None else value


class StatePolicy(_Section):
    """In which store the state of windows lives, and in what form."""

    backend: Literal["tiered", "memory", "rocksdb"] = Field(
        default="tiered",
        description="The store: tiered keeps a part of each window in memory and the rest in RocksDB, "
        "memory keeps all in memory, rocksdb keeps all on disk.",
    )
    codec: Literal["arrow"] = Field(default="arrow", description="How the rows of a block become bytes.")
    compression: Literal["none", "lz4", "zstd"] = Field(
        default="none", description="How the bytes of a block are compressed: not, fast, or small."
    )
    shards: Shards = Field(
        default="auto",
        description="Hash ranges of keys, worked on in parallel; auto: one per Spark partition.",
    )
    dir: Location = Field(
        default=None,
        description="The folder of the state's versions, on any filesystem that pyarrow.fs reaches; "
        "null: chosen when the query starts.",
    )


class MemoryPolicy(_Section):
    """How much memory the state of windows may take."""

    budget_bytes: Size = Field(
        default=512 << 20, alias="budget", description="Bytes that all m-buckets of a host may take together."
    )
    bucket_limit_bytes: Size = Field(
        default=64 << 20,
        alias="bucket_limit",
        description="Bytes that the m-bucket of one window may take; what is beyond goes to its p-bucket.",
    )

    @model_validator(mode="after")
    def _bucket_fits_budget(self) -> Self:
        if self.bucket_limit_bytes > self.budget_bytes:
            limit, budget = format_bytes(self.bucket_limit_bytes), format_bytes(self.budget_bytes)
            text = f"{limit} is larger than memory.budget, {budget}; set bucket_limit to at most '{budget}'"
            raise PydanticCustomError("across", text, {"keys": ("bucket_limit", "budget")})
        return self


class BlocksPolicy(_Section):
    """How events are packed before Spark's shuffle."""

    target_bytes: Annotated[Size, AfterValidator(_block_size)] = Field(
        default=1 << 20,
        alias="target",
        description="Bytes to which blocks are filled, about, before the shuffle.",
    )


class LatenessPolicy(_Section):
    """How late an event may be before its window is gone."""

    initial_bound_us: Bound = Field(
        default=600_000_000,
        alias="initial_bound",
        description="Time that a window is kept after its end; fixed for a window when it is made.",
    )


class TriggerPolicy(_Section):
    """When a window that has late events is executed again."""

    kind: Literal["every_batch"] = Field(
        default="every_batch", description="every_batch: once for each batch that brought late events."
    )


class Policy(_Section):
    """What Aion keeps where, for how long, and what it executes when."""

    state: StatePolicy = StatePolicy()
    memory: MemoryPolicy = MemoryPolicy()
    blocks: BlocksPolicy = BlocksPolicy()
    lateness: LatenessPolicy = LatenessPolicy()
    trigger: TriggerPolicy = TriggerPolicy()


# -- what a policy is given as ------------------------------------------------------------------------

KeyPath = tuple[str, ...]
_KEYWORD = "keyword "
Source = str | os.PathLike[str] | Mapping[str, Any] | Policy


class KeyDoc(NamedTuple):
    """One key of a policy file; ``default`` as it would be written there."""

    key: str
    type: str
    default: object
    doc: str


def load_policy(source: Source, overrides: Mapping[str, object] | None = None) -> Policy:
    """The policy of a preset's name, a path, a mapping of the YAML's shape, or a policy.

    ``overrides``: ``memory.budget``, ``memory_budget``, or ``memory`` with a mapping. Raises PolicyError with
    every problem, one a line: where it was written, the key, the value, and what would be right.
    """
    layers = _Layers()
    layers.add_source(source, "policy")
    layers.add_flat(overrides or {}, _KEYWORD)
    return layers.policy()


def resolve(policy: Source | None = None, *, keyword: Mapping[str, object], spark_conf: Mapping[str, str]) -> Policy:
    """The policy of all layers. Without ``policy``: that of ``spark.aion.policy``, or else ``standard``.

    Raises PolicyError as :func:`load_policy`, also for a ``spark.aion.*`` setting that is no key.
    """
    ours = {key: value for key, value in spark_conf.items() if key.startswith(SPARK_PREFIX)}
    conf = {key.removeprefix(SPARK_PREFIX): value.strip() for key, value in ours.items()}
    named = conf.pop("policy", None)
    layers = _Layers()
    if policy is None and named is not None:
        layers.add_source(named, f"Spark conf {SPARK_PREFIX}policy")
    else:
        layers.add_source("standard" if policy is None else policy, "policy")
    layers.add_flat(conf, f"Spark conf {SPARK_PREFIX}")
    layers.add_flat(keyword, _KEYWORD)
    return layers.policy()


def presets() -> list[str]:
    """The names of the presets that come with Aion."""
    names = (file.name for file in resources.files("policies").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """A plain dict of the YAML's shape that :func:`policy_from_json` reads back to an equal policy."""
    return policy.model_dump(mode="json", by_alias=True)


def policy_from_json(data: Mapping[str, Any]) -> Policy:
    """The policy that :func:`policy_to_json` wrote. Raises PolicyError."""
    return load_policy(data)


def describe() -> list[KeyDoc]:
    """Every key of a policy, in the order of the model."""
    docs = []
    for path, field in _leaves(Policy):
        words = next((item for item in field.metadata if isinstance(item, str)), None)
        words = words or " | ".join(get_args(field.annotation))
        default = reduce(getitem, path, policy_to_json(Policy()))
        docs.append(KeyDoc(".".join(path), words, default, field.description or ""))
    return docs


def json_schema() -> dict[str, Any]:
    """The JSON schema of a policy file, for editors and other tools."""
    schema = Policy.model_json_schema(by_alias=True)
    defaults = policy_to_json(Policy())
    for section, values in defaults.items():
        reference = schema["properties"][section]
        reference.pop("default", None)
        properties = schema["$defs"][reference["$ref"].rsplit("/", 1)[-1]]["properties"]
        for key, default in values.items():
            properties[key]["default"] = default  # as a file would say it: 512MiB, not 536870912
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


# -- how it is read -----------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """Where something was written: a file and its line, a keyword, a key of Spark's conf."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


class _Layers:
    """Settings of several sources, later ones over earlier ones, and where each was written."""

    def __init__(self) -> None:
        self._tree: dict[str, Any] = {}
        self._origins: dict[KeyPath, _Origin] = {}  # the latest last
        self._problems: list[tuple[_Origin, str]] = []

    def add_source(self, source: object, name: str) -> None:
        if isinstance(source, Policy):
            self._merge(self._tree, policy_to_json(source), _Origin(name))
        elif isinstance(source, Mapping):
            self._merge(self._tree, source, _Origin(name))
        elif isinstance(source, str | os.PathLike):
            self._tree = self._read(source, name)
        else:
            names = ", ".join(presets())
            raise PolicyError(f"{name}: {_show(source)} is none; give a preset ({names}), a path, a mapping")

    def add_flat(self, settings: Mapping[str, object], where: str) -> None:
        """Dotted keys; a keyword of Python, which can have no dot, has underscores instead."""
        keywords = {"_".join(path): path for path, _ in _leaves(Policy) if where == _KEYWORD}
        seen: set[KeyPath] = set()
        for key, value in settings.items():
            path, origin = keywords.get(key) or tuple(key.split(".")), _Origin(where + key)
            if path in seen:
                self._problems.append((origin, f"{'.'.join(path)}: given in two spellings; keep one"))
            seen.add(path)
            nested: Any = value
            for part in reversed(path):
                nested = {part: nested}
            self._merge(self._tree, nested, origin)

    def policy(self) -> Policy:
        policy = Policy()
        try:
            policy = Policy.model_validate(self._tree)
        except ValidationError as invalid:
            self._problems += [self._problem(error) for error in invalid.errors(include_url=False)]
        if self._problems:
            raise PolicyError("\n".join(f"{origin}: {problem}" for origin, problem in sorted(self._problems)))
        return policy

    def _read(self, source: str | os.PathLike[str], name: str) -> dict[str, Any]:
        """The tree of a preset or else of a file: ``./standard`` is a file called like a preset."""
        file = resources.files("policies") / f"{source}.yaml" if source in presets() else Path(source)
        try:
            loader = yaml.SafeLoader(file.read_bytes())
            root = loader.get_single_node()
            values = None if root is None else self._plain(loader, root, str(file), ())
        except (OSError, ValueError) as error:  # ValueError: a path that can be none
            near, names = (
                _nearest(str(source), {preset: preset for preset in presets()}),
                ", ".join(presets()),
            )
            reason = f"is no preset and cannot be read as a file ({getattr(error, 'strerror', error)})"
            raise PolicyError(f"{name}: {_show(str(source))} {reason}; {near}presets are {names}") from None
        except (yaml.YAMLError, RecursionError) as error:  # RecursionError: an alias of its own parent
            mark = getattr(error, "problem_mark", None)
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            at = _Origin(str(file), mark.line + 1 if mark else 0)
            raise PolicyError(f"{at}: this cannot be read as YAML: {reason}") from None
        if not isinstance(values, dict | None):
            raise PolicyError(f"{file}: {_show(values)} is no policy; write sections: {', '.join(_keys(()))}")
        return values or {}

    def _plain(self, loader: yaml.SafeLoader, node: yaml.Node, file: str, path: KeyPath) -> Any:
        """The plain value of a node; notes where every key below it stands."""
        if not isinstance(node, yaml.MappingNode):
            try:
                value = loader.construct_object(node, deep=True)
            except ValueError as error:  # what YAML takes for a date, but is none
                raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None
            return _FileNumber(value) if type(value) is int else value
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            inner, at = (*path, key), _Origin(file, key_node.start_mark.line + 1)
            if key in result:
                first = self._origins[inner]
                self._problems.append((at, f"{'.'.join(inner)}: written twice, before in {first}; keep one"))
            self._origins[inner] = at
            result[key] = self._plain(loader, child, file, inner)
        return result

    def _merge(self, tree: dict[str, Any], values: Mapping[str, object], origin: _Origin, path: KeyPath = ()) -> None:
        for key, value in values.items():
            inner = (*path, str(key))
            self._origins.pop(inner, None)
            self._origins[inner] = origin
            below = tree.get(inner[-1])
            if isinstance(value, Mapping):
                tree[inner[-1]] = below = below if isinstance(below, dict) else {}
                self._merge(below, value, origin, inner)
            elif value is not None or not isinstance(below, dict):  # an empty section says nothing
                tree[inner[-1]] = value

    def _problem(self, error: ErrorDetails) -> tuple[_Origin, str]:
        """Where an error of pydantic was written, and what it says in the words of a policy."""
        path, context = tuple(map(str, error["loc"])), error.get("ctx", {})
        keys = [(*path, key) for key in context["keys"]] if error["type"] == "across" else [path]
        written = [known for known in self._origins if known in keys]
        origin = self._origins[written[-1]] if written else _Origin("policy")
        match error["type"]:
            case "across":
                text = error["msg"]
                for key in keys:
                    if key != written[-1]:
                        text += f"; {'.'.join(key)} is from {self._origins.get(key, 'the defaults')}"
            case "extra_forbidden":
                text = f"unknown key; {_nearest_key(path)}allowed here: {', '.join(_keys(path[:-1]))}"
            case "model_type":
                text = f"{_show(error['input'])} is no section; write below it: {', '.join(_keys(path))}"
            case "literal_error":
                text = f"{_show(error['input'])} is not possible; write {context['expected']}"
            case _:
                text = re.sub("^(size|duration): ", "", str(context.get("error", error["msg"])))
        return origin, f"{'.'.join(keys[0])}: {text}"


def _leaves(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = (*path, field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, inner)
        else:
            yield inner, field


def _keys(section: KeyPath) -> list[str]:
    depth = len(section)
    return list(dict.fromkeys(path[depth] for path, _ in _leaves(Policy) if path[:depth] == section))


def _nearest(word: str, choices: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(word.lower(), choices, n=1)
    return f"did you mean {choices[close[0]]}? " if close else ""


def _nearest_key(path: KeyPath) -> str:
    *section, key = path
    if "." in key:
        return f"write it as {key.replace('.', ': {')}: ...{'}' * key.count('.')}; "
    beside = {name: ".".join((*section, name)) for name in _keys(tuple(section))}
    elsewhere = {spelt: ".".join(leaf) for leaf, _ in _leaves(Policy) for spelt in (leaf[-1], "_".join(leaf))}
    return _nearest(key, elsewhere | beside)
