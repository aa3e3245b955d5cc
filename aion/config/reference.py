"""What the model says of itself: the keys, their JSON schema, and the page of documentation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from importlib import resources
from operator import getitem
from typing import Any, NamedTuple, get_args

from aion.config.layers import load_policy, presets
from aion.config.model import Policy, leaves, policy_to_json, setting_text


class KeyDoc(NamedTuple):
    """One key of a policy file; ``default`` as it would be written there."""

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
            properties[key]["default"] = default  # as a file would say it: 512MiB, not 536870912
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def differences(preset: str) -> dict[str, object]:
    """The keys in which a preset is not the default, and its values as they would be written."""
    defaults = policy_to_json(Policy())
    return {
        f"{section}.{key}": value
        for section, keys in policy_to_json(load_policy(preset)).items()
        for key, value in keys.items()
        if value != defaults[section][key]
    }


def purpose(preset: str) -> str:
    """What a preset is for: what its file says after its name."""
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
    parts.append("## Presets\n\nEach file says of every key what it does and when to change it.\n")
    compared = []
    for preset in presets():
        differing = [f"`{key}: {setting_text(value)}`" for key, value in differences(preset).items()]
        link = f"[`{preset}`](../policies/{preset}.yaml)"
        compared.append((link, purpose(preset), "<br>".join(differing) or "nothing"))
    parts.append(_table(("preset", "for what", "differs from the defaults in"), compared))
    parts.append(_PLUGINS)
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


_INTRODUCTION = """\
<!-- Written by `python -m aion.cli policy docs > docs/policies.md`; a test fails when it is not current. -->
# Policies

A policy says what Aion keeps where, for how long, and what it executes when. It is given as the name of a preset,
as the path of a YAML file, or as a mapping of the same shape:

```python
aion.configure(builder, policy="low_memory")
aion.configure(builder, policy="my.yaml", memory_budget="25%")
aion.LocalOperator(..., policy={"memory": {"budget": "1GiB"}})
```

Every key can also be set as `spark.aion.<section>.<key>`, in `spark-submit` or elsewhere (`null` is null, a mapping
is JSON), and as a keyword of `aion.configure` (`memory_budget=...`). A keyword wins over Spark's configuration,
which wins over the file, which wins over the defaults. `spark.aion.policy` is a preset, a path, or a mapping as JSON.

- **Sizes** have a unit, or are a number of bytes: B, KiB MiB GiB TiB (1024), KB MB GB TB (1000).
- **Durations** always have a unit: us, ms, s, m, h, d, w or their English names; `1 hour 30 minutes` is one.
- **Shares** are numbers from 0 to 1, or per cent: `0.75` and `75%` are the same.

`aion policy check FILE` tells every mistake with its line and what would be right, `aion policy explain FILE` what
will happen to a window, in words with the numbers, `aion policy schema` prints the
[JSON schema](../policies/schema.json) for your editor.
"""

_PLUGINS = """\
## Policies of your own

What is destaged, and when prestaging starts, can be decided by a class of yours. It gets a read-only view with the
time in it, and answers with suggestions; it does no I/O and has no clock. A suggestion that cannot be carried out is
refused, and the log says why.

```python
# mine.py, importable by the Python of every executor
from policies.destage import MemoryView, Suggestion


class OldestFirst:
    \"\"\"Destages what was not touched for the longest time, as long as more than a share of the budget is used.\"\"\"

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

`prestage.class` likewise names a class with `start_at_s(due_s, size_bytes, pessimistic_s)` and
`observe(size_bytes, seconds)`: see `policies/prestage.py`. A class is imported when the state server starts, not
before: `aion policy check` looks at the form of its name only.
"""
