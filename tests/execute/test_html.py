"""What a notebook shows of specifications, operators and metrics."""

from __future__ import annotations

from dataclasses import fields

import pyarrow as pa

import aion
from aion import aggregates as A
from aion.metrics import StateMetrics
from tests.local.seconds import at


def test_a_specification_shows_what_was_given() -> None:
    spec = aion.Spec(windows=aion.Tumbling("1 m"), time="ts", aggregates={"<n>": A.count()}, bound="2 hours")
    shown = spec._repr_html_()
    assert "<caption>aion.Spec windowed</caption>" in shown and "tumbling 1 minute" in shown
    assert "aggregates &lt;n&gt;" in shown and "count(*)" in shown and "2 hours" in shown
    assert "completeness" not in shown, "it has its default"
    assert (
        '<td style="text-align:left">len -&gt; n int</td>'
        in aion.Spec(
            windows=aion.Tumbling("1 m"),
            time="ts",
            apply=aion.Apply(len, "n int"),
        )._repr_html_()
    )


def test_an_operator_shows_its_counters() -> None:
    with aion.LocalOperator(windows=aion.Tumbling("1 m"), time="ts", aggregates={"n": A.count()}) as operator:
        assert 'watermark</th><td style="text-align:left">none' in operator._repr_html_()
        operator.process(pa.table({"ts": at(1, 2)}), 5_000_000)
        shown = operator._repr_html_()
    assert "1970-01-01T00:00:05" in shown and "executions on_time" in shown
    assert 'events</th><td style="text-align:left">2</td>' in shown


def test_metrics_are_a_table() -> None:
    shown = StateMetrics(**{field.name: 1234567 for field in fields(StateMetrics)})._repr_html_()
    assert "budget_bytes" in shown and "1,234,567" in shown
