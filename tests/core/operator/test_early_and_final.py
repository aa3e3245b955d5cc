"""Early panes of open windows, exactly one final pane, and when a row cannot change any more (``closes_at``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.numbers import NEVER
from aion.core.keyed.closing import Closing
from aion.core.lateness.bound import AdaptiveBound
from aion.core.life.rules import Overrides, PolicyRules, Rules
from aion.core.trigger.triggers import EveryBatchTrigger
from aion.core.windows import Definition
from aion.errors import ConfigError, PolicyError, WindowError
from policies.cleanup import Reason
from tests.core.keyed.test_keyed_windows import KINDS, Sink, Step, events, policy, table
from tests.durations import us
from tests.examples import some
from tests.keyed_oracle import Event, Oracle, Window, windows_of
from tests.operators import bound_of

EARLY = {
    "session": lambda early: aion.Session(us(5), early=early),
    "count": lambda early: aion.Count(3, early=early),
    "overlapping counts": lambda early: aion.Count(3, 2, early=early),
    "punctuated": lambda early: aion.Punctuated("mark", early=early),
}
FINAL = [aion.Session(us(5)), aion.Count(3), aion.Count(3, 2), aion.PerRecord(us(4)), aion.Punctuated("mark")]
FAR = 10**9
EPOCH = datetime(1970, 1, 1)
steps = st.lists(st.lists(events, max_size=8) | st.integers(-20, 90), max_size=14)


def apart(script: Sequence[Step]) -> list[Step]:
    """The script without second events of a key at one instant: windows of such events can look alike."""
    seen: set[tuple[int, int]] = set()
    kept: list[Step] = []
    for step in script:
        if isinstance(step, int):
            kept.append(step)
            continue
        batch = [e for e in step if (e.key, e.t) not in seen]
        batch = list({(e.key, e.t): e for e in batch}.values())
        seen |= {(e.key, e.t) for e in batch}
        kept.append(batch)
    return kept


def open_windows(definition: Definition, own: Sequence[Event], watermark: int) -> list[Window]:
    """The windows of one key that have begun and that the watermark has not passed, as an early pane shows them."""
    found = [w for w in windows_of(definition, own) if w.over > watermark]
    in_order = sorted(own, key=lambda e: e.t)
    if isinstance(definition, aion.Count):
        n = definition.n
        rest = [in_order[i:] for i in range(0, len(own), definition.slide) if i + n > len(own)]
        found += [Window(g[0].t, g[-1].t + 1, NEVER, tuple(g)) for g in rest]
    return [w._replace(end=w.events[-1].t + 1) if w.end == NEVER else w for w in found]


class Clock:
    """When early panes may come: at the first watermark, and whenever it has moved by ``every`` since."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.at: int | None = None
        self.last: int | None = None

    def fires(self, watermark: int) -> bool:
        if self.at is not None and watermark <= self.at:
            return False
        self.at = watermark
        if self.last is not None and watermark < self.last + self.every:
            return False
        self.last = watermark
        return True


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", list(EARLY))
@some(1 / 3)
@given(script=steps, bound=st.sampled_from([0, 7, 40]), early=st.sampled_from([1, 10, 0]))
# A punctuation that comes late ends a window just where its early pane ended.
@example(
    script=[[Event(0, 0, 0, False, 1), Event(0, 50, 0, False, 1)], 51, [Event(0, 51, 0, True, 1)], 52], bound=0, early=1
)
def test_early_panes_show_the_open_windows_of_each_key(
    name: str, kind: str, script: list[Step], bound: int, early: int
) -> None:
    definition = EARLY[name](us(early) if early else "batch")
    sink, oracle, clock = Sink(), Oracle(definition, bound, by_event=kind == "events"), Clock(early)
    with aion.LocalOperator(windows=definition, key="key", time="t", policy=policy(bound), **KINDS[kind]) as operator:
        watermark: int | None = None
        for step in apart(script):
            before = len(sink.all)
            if isinstance(step, int):
                sink.take(operator.advance(step))
                oracle.advance(step)
            elif step:
                sink.take(operator.process(table(step)))
                oracle.process(step)
            came = [row["kind"] for row in sink.all[before:]]
            if isinstance(step, int):
                watermark = step if watermark is None else max(step, watermark)
            fires = watermark is not None if early == 0 else isinstance(step, int) and clock.fires(step)
            if watermark is None or not fires:
                assert "early" not in came
                continue
            shown = {
                (key, w.start, w.end): sorted(e.value for e in w.events)
                for key, own in oracle.live.items()
                for w in open_windows(definition, own, watermark)
            }
            assert shown.keys() <= sink.rows.keys()
            for place, values in shown.items():
                [row] = sink.rows[place]
                assert row["events"] == len(values)
                if "values" in row:
                    assert sorted(row["values"]) == values
            assert all(place in shown for place, [row] in sink.rows.items() if row["kind"] == "early")


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("definition", FINAL, ids=str)
@some(1 / 3)
@given(script=steps, bound=st.sampled_from([0, 7, 40]))
def test_a_final_pane_comes_once_when_the_window_is_closed(
    definition: Definition, kind: str, script: list[Step], bound: int
) -> None:
    oracle = Oracle(definition, bound, by_event=kind == "events")
    rows: list[dict[str, Any]] = []
    with aion.LocalOperator(
        windows=definition, key="key", time="t", policy=policy(bound), emit="final", **KINDS[kind]
    ) as operator:
        for step in [*apart(script), FAR]:
            sink, closed = Sink(), len(oracle.done)
            if isinstance(step, int):
                sink.take(operator.advance(step))
                oracle.advance(step)
            elif step:
                sink.take(operator.process(table(step)))
                oracle.process(step)
            panes = [row for row in sink.all if row["kind"] != "dropped"]
            assert {row["kind"] for row in panes} <= {"final"}
            assert all(row["pane"] == 0 for row in panes)
            found = Counter((row["key"], row["window_start"], row["window_end"], row["events"]) for row in panes)
            assert found == Counter((key, w.start, w.end, len(w.events)) for key, w in oracle.done[closed:])
            rows += sink.all
        assert operator.close().num_rows == 0
    assert sum(row["events"] for row in rows if row["kind"] == "dropped") == len(oracle.dropped)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.lists(st.integers(-20, 60), max_size=3)), max_size=30)
)
def test_what_a_pane_says_about_its_closing_stays_true_when_bounds_change(
    moves: list[tuple[int, int, list[int]]],
) -> None:
    closing, promised, watermark = Closing(), [], 0
    for step, bound, ends in moves:
        watermark += step
        before = closing.closed_us
        closing.advance(watermark, bound)
        assert closing.closed_us >= max(before, watermark - bound)
        assert all(closing.closed_us >= end for end, closes in promised if closes <= watermark)
        last = [end for end, _ in promised if before < end <= closing.closed_us]
        for end, closes_at in zip(last, closing.promise(np.array(last, np.int64), bound).tolist(), strict=True):
            assert closes_at <= min(c for e, c in promised if e == end), "the last pane says nothing later"
        new = [end for end in ends if end > closing.closed_us]
        closes = closing.promise(np.array(new, np.int64), bound).tolist()
        assert all(c <= end + bound for end, c in zip(new, closes, strict=True))
        assert all(c > watermark for c in closes), "what is closed yields no pane"
        promised += zip(new, closes, strict=True)
        closing = Closing(closing.closed_us, closing.to_json())


@pytest.mark.parametrize("definition", FINAL, ids=str)
@some(1 / 3)
@given(script=steps, bound=st.sampled_from([0, 1, 7, 40]))
@example(script=[[Event(0, 0, 0)], 90, [Event(0, 50, 0)], [Event(0, 60, 0)], [Event(0, 40, 0)]], bound=1)
@example(script=[[Event(0, 0, 0)], 90, [Event(0, 50, 0, True)], [Event(0, 40, 0)]], bound=1)
@example(script=[[Event(0, 24, 0), Event(0, 30, 0), Event(0, 34, 0)], 31, [Event(0, 26, 0)], 37, 60], bound=7)
def test_a_row_does_not_change_from_closes_at_on(definition: Definition, script: list[Step], bound: int) -> None:
    """Also if the watermark stands still, the window is completed when it is closed, or it joins one that goes on."""
    promised: dict[tuple[int, int, int], int] = {}
    watermark = -NEVER
    with aion.LocalOperator(
        windows=definition, key="key", time="t", policy=policy(bound), **KINDS["partials"]
    ) as operator:
        sink = Sink()
        for step in [*apart(script), FAR]:
            before = len(sink.all)
            sink.take(operator.advance(step) if isinstance(step, int) else operator.process(table(step)))
            panes = [row for row in sink.all[before:] if row["kind"] != "dropped"]
            over = {place for place, closes_us in promised.items() if closes_us <= watermark}
            assert not over & {(row["key"], row["window_start"], row["window_end"]) for row in panes}
            watermark = max(watermark, step) if isinstance(step, int) else watermark
            for row in panes:
                if row["closes_at"] is not None:
                    closes_us = (row["closes_at"] - EPOCH) // timedelta(microseconds=1)
                    promised[row["key"], row["window_start"], row["window_end"]] = closes_us


WAKING: list[tuple[Definition, dict[str, Any]]] = [
    *((definition, {}) for definition in FINAL),
    *((definition, {"emit": "final"}) for definition in FINAL),
    *((make("7 microseconds"), {}) for make in EARLY.values()),
    (aion.Tumbling(us(10)), {}),
    (aion.Sliding(us(10), us(5)), {"emit": "final"}),
    (aion.Cumulative(us(5), us(20)), {"emit": "final"}),
    (aion.Cumulative(us(5), us(20), early="batch"), {}),
    (aion.Tumbling(us(40), early="7 microseconds"), {}),
    *((make("batch"), {}) for make in EARLY.values()),
    (aion.Sliding(us(40), us(10), early="batch"), {}),
]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(("definition", "how"), WAKING, ids=str)
@some(1 / 3)
@given(script=steps, bound=st.sampled_from([0, 1, 7, 40]), count=st.sampled_from([1, 3]))
@example(script=[[Event(0, 10, 0)], 15, [Event(0, 14, 0)], 18], bound=3, count=1)
def test_nothing_is_due_before_the_operator_says_so(
    definition: Definition, how: dict[str, Any], script: list[Step], bound: int, count: int
) -> None:
    """Spark calls a shard without rows only at the watermark that it asked for."""
    trigger = {"kind": "count", "count": count}
    settings = policy(bound, trigger)
    with aion.LocalOperator(
        windows=definition, key="key", time="t", policy=settings, **KINDS["partials"], **how
    ) as operator:
        for step in [*apart(script), FAR]:
            if not isinstance(step, int):
                operator.process(table(step))
                continue
            windows = operator._windows
            due_us = None if windows is None else windows.operator.next_due_us
            rows = operator.advance(step)
            if due_us is None or due_us > step:
                assert rows.num_rows == 0, f"due at {due_us}"


@pytest.mark.parametrize("make", EARLY.values(), ids=list(EARLY))
def test_the_first_watermark_is_waited_for_where_panes_come_early(make: Any) -> None:
    with aion.LocalOperator(
        windows=make("7 microseconds"), key="key", time="t", policy=policy(1), **KINDS["partials"]
    ) as operator:
        operator.process(table([Event(0, 10, 0), Event(0, 12, 1)]))
        assert operator._windows is not None
        assert operator._windows.operator.next_due_us == -NEVER, "though the windows begin later"
        assert [row["kind"] for row in operator.advance(9).to_pylist()] == ["early"]


@pytest.mark.parametrize(
    ("definition", "watermark"), [(aion.Session(us(5)), 17), (aion.PerRecord(us(5)), 14), (aion.Count(1), 14)], ids=str
)
def test_a_promise_is_kept_when_nobody_comes_and_the_bound_has_become_longer(
    definition: Definition, watermark: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 3
    monkeypatch.setattr(AdaptiveBound, "bound_for_new_window", lambda self: bound)
    settings = policy(3, {"kind": "count", "count": 9})
    with aion.LocalOperator(windows=definition, key="key", time="t", policy=settings, **KINDS["partials"]) as operator:
        operator.process(table([Event(0, 10, 0), Event(0, 12, 1)]))
        promised = max(row["closes_at"] for row in operator.advance(watermark).to_pylist())
        bound = 500
        operator.process(table([Event(0, 11, 2)]))
        assert operator._windows is not None
        due_us = operator._windows.operator.next_due_us
        assert due_us is not None and EPOCH + timedelta(microseconds=due_us) <= promised


def test_what_is_not_complete_has_no_instant_of_closing() -> None:
    assert Closing().promise(np.array([NEVER]), 10).tolist() == [NEVER]


# -- a few cases by hand ----------------------------------------------------------------------------------


def at(*seconds: int, key: str = "a") -> pa.Table:
    times = pa.array([s * 1_000_000 for s in seconds], pa.timestamp("us", "UTC"))
    return pa.table({"ts": times, "k": [key] * len(seconds)})


def counted(window: Any, bound: str = "10 minutes", early: str | None = None, **more: Any) -> aion.LocalOperator:
    settings = {"lateness": {"initial_bound": bound, "coverage": None}, "trigger": {"kind": "every_batch"}}
    settings["trigger"] |= {} if early is None else {"early": early}
    return aion.LocalOperator(windows=window, time="ts", key="k", aggregates={"n": A.count()}, policy=settings, **more)


def brief(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((r["kind"], r["pane"], r["k"], r["n"]) for r in table.to_pylist())


SECOND = 1_000_000


@pytest.mark.parametrize("how", ["definition", "policy"])
def test_a_day_shows_what_came_so_far(how: str) -> None:
    own = {"early": "1 minute"} if how == "definition" else {}
    policy = {} if how == "definition" else {"early": "1 minute"}
    with counted(aion.Tumbling("1 day", **own), **policy) as operator:
        operator.process(at(10, 20))
        assert brief(operator.advance(30 * SECOND)) == [("early", 0, "a", 2)]
        operator.process(at(40, key="b"))
        assert brief(operator.advance(89 * SECOND)) == [], "less than a minute since the early pane"
        assert brief(operator.advance(90 * SECOND)) == [("early", 1, "b", 1)], "only b has news"
        assert brief(operator.advance(200 * SECOND)) == [], "no news"
        assert brief(operator.advance(86400 * SECOND)) == [("on_time", 2, "a", 2), ("on_time", 2, "b", 1)]
        operator.process(at(50))
        assert operator.counters["executions"] == {"early": 2, "on_time": 1, "late": 1, "final": 0}


@pytest.mark.parametrize("window", [aion.Tumbling("1 day", early="1 minute"), aion.Session("1 hour", early="1 minute")])
def test_early_panes_come_at_the_end_of_the_batch_and_show_what_came_in_it(window: Definition) -> None:
    with counted(window) as operator:
        assert brief(operator.process(at(10), 5 * SECOND)) == [("early", 0, "a", 1)]
        assert brief(operator.process(at(10, key="b"), 64 * SECOND)) == []
        found = operator.process(at(4000 * 24, key="c"), 65 * SECOND).to_pylist()
        assert sorted((r["kind"], r["k"], r["n"]) for r in found) == [("early", "b", 1), ("early", "c", 1)]


@pytest.mark.parametrize("how", ["definition", "policy"])
@pytest.mark.parametrize("kind", [aion.Tumbling, aion.Session])
def test_early_panes_come_in_each_batch_with_news_though_the_watermark_stands(kind: Any, how: str) -> None:
    own, policy = ({"early": "batch"}, {}) if how == "definition" else ({}, {"early": "batch"})
    with counted(kind("1 day", **own), **policy) as operator:

        def said(table: pa.Table) -> list[tuple[Any, ...]]:
            return [(row["kind"], row["k"], row["n"]) for row in table.to_pylist() if row["kind"] != "retracted"]

        assert said(operator.process(at(10))) == [], "nothing is known of the watermark"
        assert said(operator.advance(5 * SECOND)) == [("early", "a", 1)]
        assert said(operator.process(at(20))) == [("early", "a", 2)]
        assert said(operator.process(at(30, key="b"))) == [("early", "b", 1)]
        assert said(operator.advance(6 * SECOND)) == [], "no news"
        assert operator.counters["executions"]["early"] == 3


def test_early_panes_come_no_sooner_because_of_a_restart() -> None:
    def made(**snapshot: Any) -> Rules:
        rules = {0: Overrides(early_us=60), 1: Overrides(early_us=60)}
        return Rules(PolicyRules(bound_of(10), EveryBatchTrigger()), rules, 2, **snapshot)

    rules = made()
    rules.advance(100)
    saved = rules.to_json({0})["early"]
    assert saved == {"0": 100}, "windows of keys keep their own"
    again = made(early={int(number): us for number, us in saved.items()})
    for to_us, is_due in ((159, False), (160, True)):
        again.advance(to_us)
        clock = again.of(0).early
        assert clock is not None and clock.is_due is is_due
        again.end_batch()
        assert not clock.is_due, "it strikes once"


def test_a_call_says_how_long_windows_are_kept_and_when_they_run_again() -> None:
    """It outranks the policy, and a definition outranks it."""
    windows = {
        "call": aion.Tumbling("10 seconds"),
        "own": aion.Tumbling("10 seconds", bound="1 minute", trigger="every_batch"),
    }
    settings = {
        "lateness": {"initial_bound": "1 day", "coverage": 0.9},
        "trigger": {"kind": "interval", "interval": "1 s"},
    }
    spec = aion.Spec(
        windows=windows, time="ts", aggregates={"n": A.count()}, policy=settings,
        bound="5 seconds", trigger={"kind": "count", "count": 2},
    )  # fmt: skip
    with aion.LocalOperator(spec) as operator:
        operator.process(at(1))
        first = operator.advance(10 * SECOND).to_pylist()
        assert [(r["window"], (r["closes_at"] - r["window_end"]).seconds) for r in first] == [("call", 5), ("own", 60)]
        assert [(r["window"], r["kind"]) for r in operator.process(at(2)).to_pylist()] == [("own", "late")]
        assert {(r["window"], r["kind"], r["n"]) for r in operator.process(at(3)).to_pylist()} == {
            ("call", "late", 3),
            ("own", "late", 3),
        }
        assert [r["window"] for r in operator.process(at(4), 15 * SECOND).to_pylist() if r["kind"] == "dropped"] == [
            "call"
        ]
    with aion.LocalOperator(spec, bound=0, trigger="every_batch") as operator:
        operator.process(at(1), 10 * SECOND)
        assert operator.policy.lateness.initial_bound_us == 0 and operator.policy.lateness.coverage is None
        assert operator.policy.trigger.kind == "every_batch"


def test_a_definition_has_its_own_bound_and_trigger() -> None:
    windows = {
        "short": aion.Tumbling("10 seconds", bound="5 seconds"),
        "long": aion.Tumbling("10 seconds", bound=0, offset="5 seconds"),
        "other": aion.Sliding("10 seconds", "5 seconds", trigger={"kind": "count", "count": 2}),
    }
    with counted(windows) as operator:
        operator.process(at(1, 7))
        first = operator.advance(20 * SECOND).to_pylist()
        closes = {(r["window"], r["window_start"].timestamp()): r["closes_at"].timestamp() for r in first}
        assert closes == {
            ("short", 0): 15, ("long", -5): 5, ("long", 5): 15,
            ("other", -5): 605, ("other", 0): 610, ("other", 5): 615,
        }  # fmt: skip
        windows = operator._windows
        assert windows is not None
        table = windows.operator.windows
        reasons = {Reason.of_code(code) for code in table["reason"][table["definition"] == 2].tolist()}
        assert reasons == {Reason.FIXED}, "the policy decided"
        rows = operator.process(at(7)).to_pylist()
        assert [(r["window"], r["kind"]) for r in rows] == [("short", "dropped"), ("long", "dropped")]
        operator.process(at(30))
        assert Reason.of_code(int(table["reason"][table["definition"] == 0][0])) is Reason.OWN
        rows = operator.process(at(7)).to_pylist()
        assert sorted({r["window"] for r in rows if r["kind"] == "late"}) == ["other"]


def test_keyed_windows_have_their_own_bound_and_trigger() -> None:
    windows = {
        "now": aion.Session("5 seconds", bound=0),
        "waits": aion.Session("6 seconds", trigger={"kind": "count", "count": 2}),
    }
    with counted(windows) as operator:
        operator.process(at(1))
        operator.advance(20 * SECOND)
        assert [(r["window"], r["kind"]) for r in operator.process(at(2)).to_pylist()] == [("now", "dropped")]
        rows = operator.process(at(3)).to_pylist()
        assert [(r["window"], r["kind"]) for r in rows if r["window"] == "waits"] == [
            ("waits", "retracted"),
            ("waits", "late"),
        ]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: aion.Tumbling("1 day", early="0 seconds"), WindowError, "Tumbling: early of '0 seconds'"),
        (lambda: aion.Session(us(5), early="soon"), WindowError, "soon"),
        (lambda: aion.PerRecord(us(5), early="1 second"), WindowError, "leave early out"),
        (lambda: aion.Count(5, bound="-1 second"), WindowError, "Count: bound of '-1 second' is negative"),
        (lambda: aion.Sliding(us(5), us(1), trigger=5), WindowError, "trigger of 5 is neither a kind nor a mapping"),
        (lambda: counted(aion.Tumbling(us(5), trigger="often")), PolicyError, "trigger.kind: 'often' is not possible"),
        (
            lambda: counted(aion.Tumbling(us(5)), trigger="often"),
            PolicyError,
            "keyword trigger: trigger.kind: 'often' is not",
        ),
        (
            lambda: counted(aion.Tumbling(us(5)), trigger={"count": 10}),
            PolicyError,
            "keyword trigger: trigger.count: 10 says nothing about kind 'staleness'",
        ),
        (
            lambda: counted(aion.Tumbling(us(5)), trigger={"kind": "count", "early": "1 minute"}),
            PolicyError,
            "trigger.early: '1 minute' is not part of a trigger; give each definition early=",
        ),
        (lambda: counted(aion.Tumbling(us(5)), trigger=5), PolicyError, "keyword trigger: trigger: 5 is not a section"),
        (
            lambda: counted(aion.Tumbling(us(5)), bound=5),
            PolicyError,
            "lateness.initial_bound: 5 is not possible; write a duration in us, ms, s, m, h, d or w",
        ),
        (lambda: counted(aion.Tumbling(us(5), early="batch"), emit="final"), ConfigError, "cannot have early='batch'"),
        (lambda: aion.Tumbling(us(5), trigger={"early": "1m"}), WindowError, "give early= beside trigger="),
        (lambda: counted(aion.Tumbling(us(5), trigger={"kind": "often"})), PolicyError, "'tumbling 5 microseconds'"),
        (lambda: aion.Tumbling(us(5), trigger={}), WindowError, "trigger of {} is empty; give e.g."),
        (
            lambda: counted({"w": aion.Tumbling(us(5), trigger={"count": 10})}),
            PolicyError,
            "'w': trigger.count: 10 says nothing about kind 'staleness'; write {'kind': 'count', 'count': 10}",
        ),
        (
            lambda: counted({"w": aion.Tumbling(us(5), trigger={"kind": "every_batch", "interval": "1m"})}),
            PolicyError,
            "trigger.interval: '1m' says nothing about kind 'every_batch'",
        ),
        (
            lambda: counted(aion.Tumbling(us(5)), emit="once"),
            ConfigError,
            "'once' is not known; give 'all', 'final' or 'changes'",
        ),
        (lambda: counted(aion.Tumbling(us(5), early=us(1)), emit="final"), ConfigError, "leave one of them out"),
        (lambda: aion.Tumbling(us(5), erly=1), TypeError, "Tumbling.. got an unexpected keyword argument 'erly'"),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
