"""Generates from the sections: the list of keys, the schema, policies as commented files, and a page of all keys."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from itertools import pairwise
from textwrap import wrap
from typing import Any, NamedTuple, get_args

import yaml

from aion.config import sections
from aion.config.layers import Source, load_policy, presets
from aion.config.model import Policy, policy_to_json, setting_text
from aion.config.values import Written

_WIDTH = 120


class KeyDoc(NamedTuple):
    """One key of a policy file. ``default`` is written as in the file. ``doc``: what it does, and when to change it."""

    key: str
    type: str
    default: object
    doc: list[str]


@cache
def _below_each_key() -> dict[tuple[str, str], list[str]]:
    """Returns the paragraphs of the text below each key, by class and field. Read from the source, so imports need
    not.
    """
    found = {}
    for section in (node for node in ast.parse(inspect.getsource(sections)).body if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(section.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[section.name, name] = [" ".join(part.split()) for part in text.split("\n\n")]
    return found


def describe() -> list[KeyDoc]:
    """Returns every key of a policy, in the order of the model."""
    docs, texts, defaults = [], _below_each_key(), policy_to_json(Policy())
    for name, section in Policy():
        for field, key in section.written().items():
            known = type(section).model_fields[field]
            written = next((item for item in known.metadata if isinstance(item, Written)), None)
            words = written.words if written is not None else " | ".join(get_args(known.annotation))
            docs.append(KeyDoc(f"{name}.{key}", words, defaults[name][key], texts[type(section).__name__, field]))
    return docs


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a policy file, for editors and other tools."""
    schema = Policy.model_json_schema(by_alias=True)
    for doc in describe():
        section, key = doc.key.split(".")
        reference = schema["properties"][section]
        reference.pop("default", None)
        properties = schema["$defs"][reference["$ref"].rpartition("/")[2]]["properties"]
        # The default as written in a file: 512MiB, not 536870912.
        properties[key] |= {"default": doc.default, "description": " ".join(doc.doc)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def differences(preset: str) -> dict[str, object]:
    """Returns the keys whose values in a preset differ from the defaults, with these values as written in a file."""
    defaults = policy_to_json(Policy())
    return {
        f"{section}.{key}": value
        for section, keys in policy_to_json(load_policy(preset)).items()
        for key, value in keys.items()
        if value != defaults[section][key]
    }


def policy_file(source: Source) -> str:
    """Returns a whole policy as a YAML file: every key, with what it does and when to change it."""
    head = [*_HEAD.splitlines(), ""] if source == "standard" else []
    return "\n".join([*head, *commented(policy_to_json(load_policy(source)))]) + "\n"


def commented(values: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Yields the lines of a policy file with these values by section and key, and a comment on each."""
    begun = ""
    for doc in describe():
        section, key = doc.key.split(".")
        if key not in values.get(section, {}):
            continue
        if section != begun:
            yield from ([""] if begun else []) + [f"{section}:"]
            begun = section
        for paragraph in doc.doc:
            yield from comment(paragraph, 2)
        value = yaml.safe_dump(values[section][key], default_flow_style=True, allow_unicode=True, width=math.inf)
        yield f"  {key}: {value.splitlines()[0]}"


def comment(text: str, indent: int = 0) -> list[str]:
    """Returns the text as lines of a YAML comment."""
    mark = " " * indent + "# "
    return wrap(text, _WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)


def purpose(preset: str) -> str:
    """Returns what a preset is for: the text after its name in the first comment of its file."""
    if preset == "standard":
        return _STANDARD
    lines = (resources.files("policies") / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(f"# {preset}: ") for line in lines if line.startswith(f"# {preset}: "))


def policy_docs() -> str:
    """Returns the reference of all keys and presets, as Markdown with links as from a page in ``docs``."""
    parts = ["# Policy keys and presets\n", "What each key of a policy does, and when to change it.\n"]
    section = ""
    for doc in describe():
        if (begun := doc.key.partition(".")[0]) != section:
            section = begun
            annotation = Policy.model_fields[section].annotation
            parts.append(f"## {section}\n\n{(annotation.__doc__ or '').strip().replace('``', '`')}\n")
        said = "\n\n".join(doc.doc)
        parts.append(f"### {doc.key}\n\n{doc.type}; default: `{setting_text(doc.default)}`\n\n{said}\n")
    parts.append("## Presets\n\nWhat differs from the defaults.\n")
    for preset in presets():
        parts.append(f"### {preset}\n\n[`{preset}`](../policies/{preset}.yaml): {purpose(preset)}\n")
        parts += [f"- `{key}: {setting_text(value)}`" for key, value in differences(preset).items()]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


_STANDARD = "the defaults. Windows stay in memory, and move to disk when they expire or when memory is full."

_HEAD = f"""\
# standard: {_STANDARD}
# Written by `python -m aion.cli policy show standard > policies/standard.yaml`; a test fails when it is not current.
#
# Sizes: B, KiB MiB GiB TiB (1024), KB MB GB TB (1000), or a plain number of bytes.
# Durations: us, ms, s, m, h, d, w or their English names, always with the unit.
# Shares: a number from 0 to 1, or a percentage (0.75 and 75% are the same).
# Every key can also be set as spark.aion.<section>.<key>, or as a keyword of aion.configure."""
