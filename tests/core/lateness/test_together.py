"""Shards of a query that learn lateness together: who is told what, what counts when, and what nobody can break."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.lateness.observe import Lateness
from policies.cleanup import BoundDecision, Cleanup, Reason
from tests.examples import some
from tests.late import DAY, HOUR, MINUTE, SECOND, Draw, drawn, exponential, lognormal

ASKED = Cleanup(15 * MINUTE, coverage=0.9)


def shard(snapshot: Any = None, asked: Cleanup = ASKED, **more: Any) -> AdaptiveBound:
    return AdaptiveBound(asked, model="empirical", half_life_us=DAY, together=True, snapshot=snapshot, **more)


def kept(bound: AdaptiveBound) -> Any:
    """Its snapshot, as a server has it."""
    return orjson.loads(orjson.dumps(bound.to_json()))


def told_of(snapshots: Sequence[Any]) -> tuple[int, list[Any]]:
    return len(snapshots), [s["learnt_bound"] for s in snapshots]


def learnt_of(snapshots: Sequence[Any]) -> tuple[int, list[Any], list[Any]]:
    return *told_of(snapshots), [s["lateness"] for s in snapshots]


def asking(bound: AdaptiveBound, at_us: int, others: Sequence[Any], to_us: int | None = None) -> AdaptiveBound:
    """Receives the results of others, learns if it is due, and goes on."""
    bound.receive(*told_of(others))
    if bound.asks(at_us):
        bound.learn(*learnt_of(others))
    bound.advance(at_us, at_us + MINUTE if to_us is None else to_us)
    return bound


def after(bound: AdaptiveBound) -> BoundDecision:
    """What holds from the next snapshot on."""
    return shard(kept(bound), bound.asked).decision


def with_history(lateness: Lateness, asked: Cleanup = ASKED) -> AdaptiveBound:
    bound = shard(asked=asked)
    bound.lateness.merge(lateness)
    return bound


# -- what is learnt from whom --------------------------------------------------------------------------------------


def test_one_that_has_seen_much_teaches_one_that_has_seen_little() -> None:
    little, at = drawn(exponential(60), windows=120, seed=0, per_window=1)
    much, _ = drawn(exponential(60), windows=120, seed=1, per_window=500)
    asked = Cleanup(30 * MINUTE)
    alone, taught = with_history(little, asked), with_history(little, asked)
    alone.advance(at, at + MINUTE)
    asking(taught, at, [kept(with_history(much, asked))])
    assert after(alone).reason is Reason.UNSUPPORTED and after(alone).bound_us >= 30 * MINUTE
    assert after(taught).reason is Reason.LEARNT
    assert after(taught).bound_us / SECOND == pytest.approx(60 * math.log(100), rel=0.1)
    assert "of 11,675 that were" in after(taught).why, "most of the late ones of the other's 60,000"
    assert taught.lateness.to_json() == little.to_json(), "what others saw is not kept as one's own"


@some(1 / 2)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_it_does_not_matter_who_asks_and_in_which_order_others_are_received(seeds: list[int], random: Any) -> None:
    everyone = []
    for number, seed in enumerate(seeds):
        lateness, at = drawn(lognormal(60), windows=90, seed=seed, per_window=5 + 40 * number, watched_us=HOUR)
        everyone.append(lateness)
    found = set()
    for order in random.sample(list(permutations(range(len(everyone)))), 2):
        asks, *others = (with_history(everyone[i]) for i in order)
        asking(asks, at, [kept(other) for other in others])
        found.add((after(asks).bound_us, after(asks).reason))
    assert len(found) == 1


# -- what counts when ----------------------------------------------------------------------------------------------


def test_what_is_found_together_counts_from_the_next_snapshot_on() -> None:
    """An attempt that receives nothing does in its batch what one does that receives everything."""
    lateness, at = drawn(exponential(60), windows=120)
    snapshot = kept(with_history(lateness))
    much, _ = drawn(exponential(200), windows=120, seed=1, per_window=500)
    said = []
    for others in ([], [kept(with_history(much))]):
        attempt = asking(shard(snapshot), at, others)
        said.append((attempt.decision, Expected(attempt).version, attempt.bound_for_new_window()))
        assert attempt.decision == shard(snapshot).decision
        assert after(attempt) != attempt.decision
    assert said[0] == said[1]


ROOM = Cleanup(15 * MINUTE, coverage=0.9, max_state_bytes=16_000)


def seen_by_one(asked: Cleanup) -> tuple[Any, int, Any]:
    """The snapshot of a shard that is about to evaluate history, its watermark, and that of a shard that has done so.

    The shard has learnt a bound, its latest windows are due to be compared with history, and its state grows.
    """
    bound = shard(asked=asked)
    drawn(exponential(60), windows=120, per_window=200, into=bound.lateness)
    at = 120 * MINUTE
    rng = np.random.default_rng(7)
    for step in range(400):
        if step > 80 and bound.asks(at) and bound.drift is not None and bound.drift.due(at):
            break
        bound = shard(kept(asking(bound, at, [])), asked)
        at += MINUTE
        bound.observe_on_time(at, 160)
        bound.observe_state(at, at, 4000 + 100 * step)
        for us in (rng.exponential(200 if step > 60 else 60, 40) * SECOND).astype(np.int64).tolist():
            bound.observe(at - us, at, 1)
    snapshot = kept(bound)
    return snapshot, at, kept(asking(shard(snapshot, asked), at, []))


@pytest.mark.parametrize("asked", [ASKED, ROOM], ids=["coverage", "coverage and max_state"])
def test_what_others_have_found_in_the_same_batch_changes_no_decision_of_it(asked: Cleanup) -> None:
    """The shards of a host run in any order. So of some the others have committed the batch already, of some not."""
    snapshot, at, ahead = seen_by_one(asked)
    assert shard(snapshot, asked).asks(at), "alone, it evaluates"
    changed, _ = drawn(lognormal(60), windows=600, seed=0)
    drawn(lognormal(900), windows=120, first=600, seed=1, into=changed, late_share=0.5)
    decisions = []
    for others in ([], [ahead], [kept(with_history(changed, asked))], [ahead, kept(with_history(changed, asked))]):
        attempt = asking(shard(snapshot, asked), at, others)
        decisions.append((attempt.decision, kept(attempt)["drift"]))
    assert decisions == [decisions[0]] * 4


def test_what_another_one_found_is_taken_over() -> None:
    lateness, at = drawn(exponential(60), windows=120, per_window=200)
    first = kept(asking(with_history(lateness), at, [kept(shard())]))
    second = shard()
    second.receive(*told_of([first]))
    assert not second.asks(at), "it has been asked"
    assert after(second) == after(shard(first)) and after(second).reason is Reason.LEARNT
    assert shard(kept(second)).outlook is not None
    # Once others have grown older than what one has found, nothing is taken over.
    third = kept(asking(shard(first), at + HOUR, [kept(second)]))
    again = shard(third)
    again.receive(*told_of([first, kept(second)]))
    assert kept(again) == third


def test_a_change_that_one_finds_is_a_change_for_all() -> None:
    lateness, at = drawn(lognormal(60), windows=600, seed=0)
    drawn(lognormal(900), windows=120, first=600, seed=1, into=lateness, late_share=0.5)
    at += 121 * MINUTE
    quiet, _ = drawn(lognormal(60), windows=600, seed=2, per_window=2)
    finder, other = asking(with_history(lateness), at, []), with_history(quiet)
    assert finder.restarts == 1 and after(finder).reason is Reason.CHANGED
    other.receive(*told_of([kept(finder)]))
    assert other.restarts == 1
    assert after(other) == after(finder)
    assert not other.lateness.epochs, "what was learnt before holds no more"
    # The result of one that does not know of the change yet is used, but not what it learnt before the change.
    young, _ = drawn(lognormal(900), windows=60, first=721, seed=3, watched_us=HOUR)
    late = with_history(quiet)
    late.lateness.merge(young)
    asking(other, at + 2 * HOUR, [kept(late)])
    outlook = shard(kept(other)).outlook
    assert outlook is not None and outlook.later_than(10 * MINUTE) > 0.4


def test_a_shard_is_not_believed_before_the_others_are_back() -> None:
    """When their server has died shards come back one by one, and one alone knows less than it did with the others."""
    lateness, at = drawn(exponential(60), windows=120, per_window=200)
    much = kept(with_history(lateness))
    before = kept(asking(shard(), at, [much, much, much]))
    later = before["learnt_bound"]["next_us"]
    assert later is not None
    for others, asks in ((3, True), (4, True), (1, False), (0, False)):
        back = shard(before)
        back.receive(others, [])
        assert back.asks(later) is asks
        assert back.asks(2 * later - at), "but not for ever: they may have gone elsewhere"


def test_room_is_each_shards_own_matter() -> None:
    asked = Cleanup(15 * MINUTE, coverage=0.9, max_state_bytes=20_000)
    lateness, at = drawn(exponential(300), windows=240, per_window=100)
    large, small = with_history(lateness, asked), shard(asked=asked)
    for window in range(240):
        large.observe_state(window * MINUTE, window * MINUTE, 4000)
    asking(large, at, [kept(small)])
    small.receive(*told_of([kept(large)]))
    assert after(large).reason is Reason.MAX_STATE and after(large).bound_us < 6 * MINUTE
    assert "because max_state is 20,000 bytes" in after(large).why and "are expected in time" in after(large).why
    assert after(small).reason is Reason.LEARNT and after(small).bound_us > 8 * MINUTE


# -- a whole query -------------------------------------------------------------------------------------------------

STEPS = st.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2])
"""Three shards; of each the first is that it is opened, the second that it works, the third that it commits."""


def beside_each_other(steps: Sequence[int]) -> bool:
    """Whether two shards work before either commits."""
    at = [[place for place, shard_ in enumerate(steps) if shard_ == number] for number in range(3)]
    return any(max(one[1], other[1]) < min(one[2], other[2]) for one, other in combinations(at, 2))


class Query:
    """Batches of three shards whose attempts run in any order, beside each other, or twice."""

    def __init__(self, draw: Draw, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.draw = draw
        self.snapshots: list[Any] = [None, None, None]
        self.coming: list[list[tuple[int, int]]] = [[], [], []]
        self.at_us: int | None = None

    def batch(self, to_us: int, steps: Sequence[int], twice: Sequence[int] = ()) -> None:
        new = self.arrive(to_us)
        done = [0, 0, 0]
        attempts: dict[int, AdaptiveBound] = {}
        for number in steps:
            done[number] += 1
            others = [s for i, s in enumerate(self.snapshots) if i != number and s is not None]
            if done[number] == 1:
                attempts[number] = shard(self.snapshots[number])
                attempts[number].receive(*told_of(others))
            elif done[number] == 2:
                self.work(attempts[number], number, to_us, others, new[number])
                if number in twice:
                    # It failed, and the next attempt receives something else.
                    first, attempts[number] = attempts[number], shard(self.snapshots[number])
                    self.work(attempts[number], number, to_us, others[:1], new[number])
                    assert attempts[number].decision == first.decision
                    assert Expected(attempts[number]).version == Expected(first).version
                    assert attempts[number].lateness.to_json() == first.lateness.to_json()
            else:
                self.snapshots[number] = kept(attempts[number])
        self.at_us = to_us

    def work(self, attempt: AdaptiveBound, number: int, to_us: int, others: Sequence[Any], new: Any) -> None:
        if attempt.asks(self.at_us):
            attempt.learn(*learnt_of(others))
        attempt.advance(self.at_us, to_us)
        for end, events in new[0]:
            attempt.observe_on_time(end, events)
        for end, events in new[1]:
            attempt.observe(end, to_us, events)

    def arrive(self, to_us: int) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
        """For each shard: windows with events in time, and late events of windows."""
        found = []
        for number, size in enumerate((2, 20, 60)):
            ends = [] if self.at_us is None else range(self.at_us + MINUTE, to_us + 1, MINUTE)
            for end in ends:
                for us in self.draw(self.rng, size // 4):
                    self.coming[number].append((end + int(us * SECOND), end))
            now = [end for at, end in self.coming[number] if at <= to_us]
            self.coming[number] = [(at, end) for at, end in self.coming[number] if at > to_us]
            found.append(([(end, size) for end in ends], [(end, 1) for end in now]))
        return found


# Two shards evaluated beside each other, with different losses.
@pytest.mark.slow
@example(
    [[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 0, 1, 2, 2, 2]], set(), 6, exponential(90)
)
# Two attempts that ran again found different results of one age.
@example(
    [[0, 0, 1, 2, 2, 0, 1, 1, 2], [0, 0, 1, 2, 2, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2]], {0, 2}, 0, lognormal(60)
)
@some(1 / 6)
@given(
    st.lists(STEPS, min_size=3, max_size=3),
    st.sets(st.integers(0, 2), max_size=2),
    st.integers(0, 9),
    st.sampled_from([lognormal(60), exponential(90)]),
)
def test_after_every_batch_all_shards_stand_on_the_same(
    orders: list[Sequence[int]], twice: set[int], seed: int, draw: Draw
) -> None:
    """In whatever order they are opened and commit; and a batch that runs again decides what it decided before."""
    query = Query(draw, seed)
    for number in range(40):
        again = twice if number % 5 == 0 else ()
        before_us = query.at_us
        query.batch((number + 1) * 5 * MINUTE, orders[number % 3], sorted(again))
        if again:
            # One that received less stands alone for a batch.
            continue
        standings = [snapshot["learnt_bound"] for snapshot in query.snapshots]
        if standings[0]["asked_us"] == before_us and beside_each_other(orders[number % 3]):
            # Shards that evaluated beside each other have different bounds until the next batch: each has lost others.
            standings = [{**standing, "decision": None, "usual_us": None} for standing in standings]
        assert standings[0] == standings[1] == standings[2]
    assert shard(query.snapshots[0]).decision.reason is Reason.LEARNT
    events = sum(sum(Lateness.from_json(s["lateness"]).counts.values()) for s in query.snapshots)
    together = Lateness(DAY)
    for snapshot in query.snapshots:
        together.merge(Lateness.from_json(snapshot["lateness"], DAY))
    assert sum(together.counts.values()) == events, "each event was observed by one shard"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [ASKED, ROOM], ids=["coverage", "coverage and max_state"])
def test_a_batch_decides_the_same_in_any_order_of_its_shards_and_when_it_is_run_again(asked: Cleanup) -> None:
    """Each batch is run in two orders, and again after each shard has committed once; then it goes on from one."""
    rng = np.random.default_rng(3)
    snapshots: list[Any] = [kept(shard(asked=asked)) for _ in range(3)]
    learnt = 0
    for batch in range(1, 46):
        at, to = batch * 5 * MINUTE, (batch + 1) * 5 * MINUTE
        median = 60 if batch < 27 else 400
        late = [[(at - int(us * SECOND), 1) for us in lognormal(median)(rng, 40 + 40 * n)] for n in range(3)]
        found, lasts = [], []
        for order in (range(3), range(2, -1, -1)):
            standing = list(snapshots)
            for again in range(2):
                for number in order:
                    others = [s for i, s in enumerate(standing) if i != number]
                    attempt = asking(shard(snapshots[number], asked), at, others, to)
                    attempt.observe_on_time(to, 400)
                    attempt.observe_state(to, to, 3000 + 40 * batch)
                    for end, events in late[number]:
                        attempt.observe(end, to, events)
                    standing[number] = kept(attempt)
                    found.append((number, attempt.decision, attempt.bound_for_new_window(), again))
            lasts.append(standing)
        for number in range(3):
            decided = {(decision, bound_us) for n, decision, bound_us, _ in found if n == number}
            assert len(decided) == 1, f"batch {batch}, shard {number}"
            learnt += next(iter(decided))[0].reason is not Reason.NO_HISTORY
        snapshots = lasts[batch % len(lasts)]
    assert learnt > 60


# -- what cannot be read -------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def broken(value: Any, where: Sequence[str], by: Any) -> Any:
    copy = orjson.loads(orjson.dumps(value))
    inner = copy
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = by
    return copy


TEACHER = kept(asking(with_history(drawn(exponential(60), windows=120, per_window=200)[0]), 121 * MINUTE, []))
PLACES = [("learnt_bound", name) for name in TEACHER["learnt_bound"]] + [
    ("lateness", name) for name in TEACHER["lateness"]
]
PLACES += [("learnt_bound", "decision", name) for name in TEACHER["learnt_bound"]["decision"]]
PLACES += [("learnt_bound", "outlook", name) for name in TEACHER["learnt_bound"]["outlook"]]


@given(st.sampled_from(PLACES), JSON)
def test_what_cannot_be_read_is_passed_over(where: Sequence[str], by: Any) -> None:
    lateness, at = drawn(exponential(60), windows=120)
    bound = asking(with_history(lateness), at, [broken(TEACHER, where, by)])
    assert isinstance(after(bound).bound_us, int)
    bound.receive(1, [by])
    bound.learn(1, [by], [by])
    bound.advance(at + HOUR, at + 2 * HOUR)
    assert isinstance(after(bound).bound_us, int)


def test_what_was_found_with_other_settings_is_not_taken_over_and_what_was_seen_is() -> None:
    lateness, at = drawn(exponential(60), windows=120, per_window=200)
    other = Cleanup(HOUR, coverage=0.5)
    told = kept(asking(with_history(lateness, other), at, []))
    bound = asking(shard(), at, [told])
    assert after(bound).reason is Reason.LEARNT
    assert after(bound).bound_us > 1.5 * after(shard(told, other)).bound_us
