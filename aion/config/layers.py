"""Reads a policy from files, mappings, Spark's configuration and keywords, and notes where each value was written.

Its only side effect is to read files. Precedence, highest first: keyword, Spark's configuration, YAML, default. A value
that only comes from a preset or a default does not count as set by the user. It adapts to the values that the user set:
see :mod:`aion.config.model`.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from aion.config.model import GONE, KeyPath, Policy, leaves, policy_to_json
from aion.config.plugin import Arguments
from aion.config.section import Contradiction
from aion.config.values import refusal, show
from aion.errors import PolicyError

SPARK_PREFIX = "spark.aion."
_KEYWORD = "keyword "
Source = str | os.PathLike[str] | Mapping[str, Any] | Policy


def load_policy(source: Source, overrides: Mapping[str, object] | None = None, *, what: str = "policy") -> Policy:
    """Loads the policy from a preset's name, a path, a mapping in the shape of the YAML file, or a policy.

    Keys of ``overrides``: ``memory.budget``, ``memory_budget``, or ``memory`` with a mapping. Raises PolicyError with
    one line per problem: where the value was written, the key, the value, and what would be right. ``what``: where a
    mapping was written.
    """
    layers = _Layers()
    layers.add_source(source, what)
    layers.add_flat(overrides or {}, _KEYWORD)
    return layers.policy()


def resolve(policy: Source | None = None, *, keyword: Mapping[str, object], spark_conf: Mapping[str, str]) -> Policy:
    """Combines all layers to a policy. A ``policy`` that is None is ``spark.aion.policy``, or else ``standard``.

    Values in Spark's configuration are strings: ``null`` means null, and a mapping is written as JSON, also for
    ``spark.aion.policy``. Raises PolicyError like :func:`load_policy`, also for a ``spark.aion.*`` setting that is not
    a key of a policy.
    """
    ours = {key: value.strip() for key, value in spark_conf.items() if key.startswith(SPARK_PREFIX)}
    conf = {key.removeprefix(SPARK_PREFIX): None if value == "null" else value for key, value in ours.items()}
    named = conf.pop("policy", None)
    layers = _Layers()
    if policy is None and named is not None:
        layers.add_source(_source_of(named), f"Spark conf {SPARK_PREFIX}policy")
    else:
        layers.add_source("standard" if policy is None else policy, "policy")
    layers.add_flat(conf, f"Spark conf {SPARK_PREFIX}")
    layers.add_flat(keyword, _KEYWORD)
    return layers.policy()


def _source_of(named: str) -> Source:
    """Returns the value of ``spark.aion.policy`` as a source: the name of a preset, a path, or a policy written as
    JSON.
    """
    if not named.startswith("{"):
        return named
    try:
        policy: dict[str, Any] = json.loads(named)
    except ValueError as error:
        raise PolicyError(f"Spark conf {SPARK_PREFIX}policy: {show(named)} is not JSON: {error}") from None
    return policy


def presets() -> list[str]:
    """Returns the names of the presets that come with Aion."""
    names = (file.name for file in resources.files("policies").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def policy_from_json(data: Mapping[str, Any]) -> Policy:
    """Reads a policy that ``policy_to_json`` wrote. Raises PolicyError."""
    return load_policy(data)


def policy_to_text(policy: Policy) -> str:
    """Returns the policy as JSON text, for tasks that run in other processes."""
    return json.dumps(policy_to_json(policy))


@lru_cache(maxsize=16)
def policy_from_text(text: str) -> Policy:
    """Returns the policy that ``policy_to_text`` wrote. A process parses each text once: a policy never changes."""
    return policy_from_json(json.loads(text))


class _Origin(NamedTuple):
    """Where a value was written: a file and its line, a keyword, or a key of Spark's configuration."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


_MAPPINGS = {path for path, field in leaves() if field.annotation is Arguments}
"""Keys whose value is a mapping. Another layer replaces such a value as a whole."""


class _Layers:
    """Settings from several sources, and where each was written. Later sources replace values of earlier ones."""

    def __init__(self) -> None:
        self._tree: dict[str, Any] = {}
        self._origins: dict[KeyPath, _Origin] = {}  # in the order in which they were written
        self._suggested: set[KeyPath] = set()  # set only by a preset, not by the user
        self._problems: list[tuple[_Origin, str]] = []

    def add_source(self, source: object, name: str) -> None:
        if isinstance(source, Policy):
            self._merge(self._tree, policy_to_json(source), _Origin(name))
            chosen = {
                (name, section.written()[field]) for name, section in source for field in section.model_fields_set
            }
            self._suggested |= {path for path, _ in leaves() if path not in chosen}
        elif isinstance(source, Mapping):
            self._merge(self._tree, source, _Origin(name))
        elif isinstance(source, str | os.PathLike):
            self._tree = self._read(source, name)
            if source in presets():
                self._suggested |= set(self._origins)
        else:
            names = ", ".join(presets())
            raise PolicyError(f"{name}: {show(source)} is not a policy; give a preset ({names}), a path or a mapping")

    def add_flat(self, settings: Mapping[str, object], where: str) -> None:
        """Adds settings with dotted keys. Python keywords cannot contain dots, so they have underscores instead."""
        keywords = {"_".join(path): path for path, _ in leaves() if where == _KEYWORD}
        seen: set[KeyPath] = set()
        for key, value in settings.items():
            path, origin = keywords.get(key) or tuple(key.split(".")), _Origin(where + key)
            if path in seen:
                self._problems.append((origin, f"{'.'.join(path)}: written in two ways; keep one"))
            seen.add(path)
            if len(path) > 2 and path[:2] in _MAPPINGS:
                whole = f"{'.'.join(path[:2])} is a single value: write it as a mapping"
                self._problems.append((origin, f"{'.'.join(path)}: unknown key; {whole}"))
                continue
            nested: Any = value
            for part in reversed(path):
                nested = {part: nested}
            self._merge(self._tree, nested, origin)

    def policy(self) -> Policy:
        policy = Policy()
        try:
            policy = Policy.model_validate(self._tree, context=self._set_by_the_user())
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                self._problems += self._problems_of(error)
        if self._problems:
            raise PolicyError("\n".join(f"{origin}: {problem}" for origin, problem in sorted(self._problems)))
        return policy

    def _set_by_the_user(self) -> dict[type, set[str]]:
        """Returns by section, the fields that the user set."""
        paths = self._origins.keys() - self._suggested
        return {
            type(section): {field for field, key in section.written().items() if (name, key) in paths}
            for name, section in Policy()
        }

    def _read(self, source: str | os.PathLike[str], name: str) -> dict[str, Any]:
        """Returns the tree of a preset or of a file. To read a file with the name of a preset, write ``./standard``."""
        file = resources.files("policies") / f"{source}.yaml" if source in presets() else Path(source)
        try:
            loader = yaml.SafeLoader(file.read_bytes())
            root = loader.get_single_node()
            values = None if root is None else self._plain(loader, root, str(file), ())
        except (OSError, ValueError) as error:  # ValueError: the text cannot be a path
            near, names = _nearest(str(source), {preset: preset for preset in presets()}), ", ".join(presets())
            reason = f"is not a preset and cannot be read as a file ({getattr(error, 'strerror', error)})"
            raise PolicyError(f"{name}: {show(str(source))} {reason}; {near}presets are {names}") from None
        except (yaml.YAMLError, RecursionError) as error:  # RecursionError: an alias to its own parent
            mark = getattr(error, "problem_mark", None)
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            at = _Origin(str(file), mark.line + 1 if mark else 0)
            raise PolicyError(f"{at}: this cannot be read as YAML: {reason}") from None
        if not isinstance(values, dict | None):
            raise PolicyError(f"{file}: {show(values)} is not a policy; write sections: {', '.join(_keys(()))}")
        return values or {}

    def _plain(self, loader: yaml.SafeLoader, node: yaml.Node, file: str, path: KeyPath) -> Any:
        """Returns the plain value of a node. Notes where every key below it was written."""
        if not isinstance(node, yaml.MappingNode):
            try:
                return loader.construct_object(node, deep=True)
            except ValueError as error:  # text that YAML takes for a date, but that is not a date
                raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            inner, at = (*path, key), _Origin(file, key_node.start_mark.line + 1)
            if key in result:
                first = self._origins[inner]
                self._problems.append((at, f"{'.'.join(inner)}: written twice, first in {first}; keep one"))
            self._origins[inner] = at
            result[key] = self._plain(loader, child, file, inner)
        return result

    def _merge(self, tree: dict[str, Any], values: Mapping[str, object], origin: _Origin, path: KeyPath = ()) -> None:
        for key, value in values.items():
            inner = (*path, str(key))
            self._origins.pop(inner, None)
            self._origins[inner] = origin
            self._suggested.discard(inner)
            below = tree.get(inner[-1])
            if isinstance(value, Mapping) and inner not in _MAPPINGS:
                tree[inner[-1]] = below = below if isinstance(below, dict) else {}
                self._merge(below, value, origin, inner)
            elif value is not None or not isinstance(below, dict) or inner in _MAPPINGS:
                tree[inner[-1]] = value  # an empty section changes nothing

    def _problems_of(self, error: ErrorDetails) -> Iterator[tuple[_Origin, str]]:
        """Yields where the values of a pydantic error were written, and the messages for the user."""
        path, context = tuple(map(str, error["loc"])), error.get("ctx", {})
        match error["type"]:
            case "across":
                yield from (self._contradiction(path, found) for found in context["found"])
                return
            case "extra_forbidden" if path in GONE:
                text = f"this key is gone; remove it: {GONE[path]}"
            case "extra_forbidden":
                text = f"unknown key; {_nearest_key(path)}allowed here: {', '.join(_keys(path[:-1]))}"
            case "model_type":
                text = f"{show(error['input'])} is not a section; write these keys below it: {', '.join(_keys(path))}"
            case "literal_error":
                text = refusal(error["input"], context["expected"])
            case _:
                text = str(context.get("error", error["msg"]))
        yield self._origins.get(path, _Origin("policy")), f"{'.'.join(path)}: {text}"

    def _contradiction(self, section: KeyPath, found: Contradiction) -> tuple[_Origin, str]:
        """The key that was written last is to blame; the message says where the others are from."""
        keys = [(*section, key) for key in found.keys]
        blamed = [known for known in self._origins if known in keys][-1]
        text = found.text
        for key in keys:
            if key != blamed:
                text += f"; {'.'.join(key)} is from {self._origins.get(key, 'the defaults')}"
        return self._origins[blamed], f"{'.'.join(keys[0])}: {text}"


def _keys(section: KeyPath) -> list[str]:
    depth = len(section)
    return list(dict.fromkeys(path[depth] for path, _ in leaves() if path[:depth] == section))


def _nearest(word: str, choices: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(word.lower(), choices, n=1)
    return f"did you mean {choices[close[0]]}? " if close else ""


def _nearest_key(path: KeyPath) -> str:
    *section, key = path
    if "." in key:
        return f"write it as {key.replace('.', ': {')}: ...{'}' * key.count('.')}; "
    beside = {name: ".".join((*section, name)) for name in _keys(tuple(section))}
    elsewhere = {spelt: ".".join(leaf) for leaf, _ in leaves() for spelt in (leaf[-1], "_".join(leaf))}
    return _nearest(key, elsewhere | beside)
