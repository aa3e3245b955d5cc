"""Generates from the model: the list of keys, the JSON schema, and the page docs/policies.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from importlib import resources
from operator import getitem
from typing import Any, NamedTuple, get_args

from aion.config.layers import load_policy, presets
from aion.config.model import Policy, leaves, policy_to_json, setting_text


class KeyDoc(NamedTuple):
    """One key of a policy file. ``default`` is written as in the file."""

    key: str
    type: str
    default: object
    doc: str


def describe() -> list[KeyDoc]:
    """Every key of a policy, in the order of the model."""
    docs = []
    for path, field in leaves():
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
            properties[key]["default"] = default  # as written in a file: 512MiB, not 536870912
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def differences(preset: str) -> dict[str, object]:
    """The keys whose values in a preset differ from the defaults, with these values as written in a file."""
    defaults = policy_to_json(Policy())
    return {
        f"{section}.{key}": value
        for section, keys in policy_to_json(load_policy(preset)).items()
        for key, value in keys.items()
        if value != defaults[section][key]
    }


def purpose(preset: str) -> str:
    """What a preset is for: the text after its name in the first comment of its file."""
    lines = (resources.files("policies") / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(f"# {preset}: ") for line in lines if line.startswith(f"# {preset}: "))


def policy_docs() -> str:
    """The page ``docs/policies.md``."""
    parts = [_INTRODUCTION, "## Keys\n"]
    sections: dict[str, list[KeyDoc]] = {}
    for doc in describe():
        sections.setdefault(doc.key.partition(".")[0], []).append(doc)
    for section, docs in sections.items():
        annotation = Policy.model_fields[section].annotation
        parts.append(f"### {section}\n\n{(annotation.__doc__ or '').strip()}\n")
        rows = [(f"`{d.key.partition('.')[2]}`", d.type, f"`{setting_text(d.default)}`", d.doc) for d in docs]
        parts.append(_table(("key", "value", "default", "what it does"), rows))
    parts.append("## Presets\n\nEach file explains what every key does and when to change it.\n")
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
  `1 hour 30 minutes`. In Python, a `timedelta` will do too, and an integer is a number of microseconds.
- **Shares** are numbers from 0 to 1, or percentages: `0.75` and `75%` are the same.

`aion policy check FILE` lists every mistake with its line and what would be right. `aion policy explain FILE` describes
what will happen to a window, in words and numbers. `aion policy schema` prints the
[JSON schema](../policies/schema.json) for your editor.
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
