"""Tables of HTML, as which a notebook shows values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape


def html_of(title: str, values: Mapping[str, object]) -> str:
    """Returns a table with a row for each value. Values of nested mappings have rows of their own."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in _flat(values)
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{rows}</tbody></table>"


def _flat(values: Mapping[str, object], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name} ")
        elif isinstance(value, list | tuple):
            yield before + name, ", ".join(map(_text, value))
        else:
            yield before + name, _text(value)


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return getattr(value, "__name__", None) or str(value)
