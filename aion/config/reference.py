"""Generates from the sections: the list of keys, the schema, policies as commented files, and docs/policies.md."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
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
    """Returns the page ``docs/policies.md``."""
    parts = [_INTRODUCTION, "## Keys\n"]
    sections: dict[str, list[KeyDoc]] = {}
    for doc in describe():
        sections.setdefault(doc.key.partition(".")[0], []).append(doc)
    for section, docs in sections.items():
        annotation = Policy.model_fields[section].annotation
        parts.append(f"### {section}\n\n{(annotation.__doc__ or '').strip()}\n")
        rows = [(f"`{d.key.partition('.')[2]}`", d.type, f"`{setting_text(d.default)}`", " ".join(d.doc)) for d in docs]
        parts.append(_table(("key", "value", "default", "what it does"), rows))
    parts.append(
        "## Presets\n\nThe file of `standard` has all keys. The others have what differs from it, and why.\n"
        "`aion policy show` with its name prints all keys.\n"
    )
    compared = []
    for preset in presets():
        different = [f"`{key}: {setting_text(value)}`" for key, value in differences(preset).items()]
        link = f"[`{preset}`](../policies/{preset}.yaml)"
        compared.append((link, purpose(preset), "<br>".join(different) or "nothing"))
    parts.append(_table(("preset", "what it is for", "differences from the defaults"), compared))
    parts.append(_PLUGINS)
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


_STANDARD = "the defaults. Windows stay in memory, and move to disk when they expire or when memory is full."

_HEAD = f"""\
# standard: {_STANDARD}
# Written by `python -m aion.cli policy show standard > policies/standard.yaml`; a test fails when it is not current.
#
# Sizes: B, KiB MiB GiB TiB (1024), KB MB GB TB (1000), or a plain number of bytes.
# Durations: us, ms, s, m, h, d, w or their English names, always with the unit.
# Shares: a number from 0 to 1, or a percentage (0.75 and 75% are the same).
# Every key can also be set as spark.aion.<section>.<key>, or as a keyword of aion.configure."""

_INTRODUCTION = """\
<!-- Written by `python -m aion.cli policy docs > docs/policies.md`; a test fails when it is not current. -->
# Policies

A policy says where Aion keeps state, for how long, and when windows run. You give it as the name of a preset, as the
path of a YAML file, or as a mapping of the same shape:

```python
aion.configure(builder, policy="low_memory")
aion.configure(builder, policy="my.yaml", memory_budget="25%")
aion.LocalOperator(..., policy={"memory": {"budget": "1GiB"}})
```

You can also set every key as `spark.aion.<section>.<key>`, in `spark-submit` or elsewhere (write `null` for null, and
a mapping as JSON), or as a keyword of `aion.configure` (`memory_budget=...`). A keyword overrides Spark's
configuration, which overrides the file, which overrides the defaults. `spark.aion.policy` is a preset, a path, or a
mapping as JSON.

- **Sizes** have a unit, or are a number of bytes: B, KiB MiB GiB TiB (1024), KB MB GB TB (1000).
- **Durations** always have a unit: us, ms, s, m, h, d, w or their English names. You can combine them:
  `1 hour 30 minutes`. What Spark takes as an interval is a duration, too: `interval 5 minutes`. In Python, so is a
  `timedelta`. Only 0 needs no unit.
- **Shares** are numbers from 0 to 1, or percentages: `0.75` and `75%` are the same.

`aion policy check FILE` lists every mistake with its line and what would be right. `aion policy explain FILE` describes
what will happen to a window, in words and numbers. `aion policy show FILE` prints the whole policy with comments, also
that of a preset. `aion policy schema` prints the JSON schema for your editor. Write it to `schema.json`, and begin your
file with `# yaml-language-server: $schema=schema.json`.
"""

_PLUGINS = """\
## Your own policies

A class of yours can decide which windows move to disk, and when prestaging starts. It gets a read-only view, which
includes the current time, and returns suggestions. It does no I/O and has no clock. If a suggestion cannot be carried
out, it is refused and the log says why.

```python
# mine.py, importable by the Python of every executor
from policies.destage import MemoryView, Suggestion


class OldestFirst:
    \"\"\"Moves the oldest windows to disk while more than a given share of the budget is used.\"\"\"

    def __init__(self, above: float) -> None:
        self.above = above

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        suggestions, used_bytes = [], view.used_bytes
        for window in sorted(view.windows, key=lambda window: window.last_append_s):
            if used_bytes <= self.above * view.limit_bytes:
                break
            used_bytes -= window.gain_bytes
            suggestions.append(Suggestion(window.name, window.keep_bytes, "the oldest"))
        return suggestions
```

```yaml
destage:
  class: mine:OldestFirst
  arguments: {above: 0.5}
```

In the same way, `prestage.class` names a class with `start_at_s(due_s, size_bytes, pessimistic_s)` and
`observe(size_bytes, seconds)`: see `policies/prestage.py`. A class is imported only when the state server starts, so
`aion policy check` can only check the form of its name.
"""
