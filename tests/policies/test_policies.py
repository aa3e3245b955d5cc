"""What leaves memory, and what comes back and when: properties of the policies."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aion import config
from policies.destage import MemoryView, StandardDestage, Suggestion, WindowView
from policies.prestage import JustInTimePrestage, StagingSpeed
from state_backends import backends

LIMIT = 1_000


def window(name: object, m_bytes: int, *, keep: int = 0, rate: float = 1.0, last_s: float = 0.0) -> WindowView:
    return WindowView(name, m_bytes, 0, keep, False, last_s, rate)  # type: ignore[arg-type]


def view(*windows: WindowView, machine: float = 0.0, now_s: float = 0.0, median_s: float | None = None) -> MemoryView:
    used = sum(w.m_bytes for w in windows)
    return MemoryView(now_s, used, LIMIT, machine, median_s, windows)


def after(seen: MemoryView, suggestions: Sequence[Suggestion]) -> MemoryView:
    """The host when everything suggested was done."""
    keep = {s.name: s.keep_bytes for s in suggestions}
    windows = [replace(w, m_bytes=min(w.m_bytes, keep.get(w.name, w.m_bytes))) for w in seen.windows]
    return replace(seen, windows=windows, used_bytes=sum(w.m_bytes for w in windows))


def names(suggestions: Sequence[Suggestion]) -> list[Any]:
    return [s.name for s in suggestions]


windows = st.builds(
    WindowView,
    name=st.integers(0, 10_000),
    m_bytes=st.integers(0, 400),
    p_bytes=st.integers(0, 400),
    keep_bytes=st.integers(0, 100),
    expired=st.booleans(),
    last_append_s=st.integers(-50, 0).map(float),
    append_rate_bytes_per_s=st.sampled_from([0.0, 0.5, 1.0, 7.0]),
    due=st.none() | st.integers(0, 9),
)


@st.composite
def views(draw: st.DrawFn) -> MemoryView:
    some = draw(st.lists(windows, max_size=8, unique_by=lambda w: w.name))
    used_bytes = sum(w.m_bytes for w in some) + draw(st.sampled_from([0, 0, 50]))  # 50: of a window that is gone
    return MemoryView(
        now_s=0.0,
        used_bytes=used_bytes,
        limit_bytes=max(1, int(used_bytes / draw(st.floats(0.2, 1.2)))),
        machine_share=draw(st.sampled_from([0.0, 0.3, 0.65, 0.8, 0.95])),
        median_execution_s=draw(st.sampled_from([None, 0.5, 10.0])),
        windows=some,
    )


policies = st.builds(
    lambda shares, victim, idle: StandardDestage(
        resume=shares[0], moderate=shares[1], scarce=shares[2], victim=victim, **idle
    ),
    st.lists(st.integers(0, 100), min_size=3, max_size=3, unique=True).map(lambda s: [n / 100 for n in sorted(s)]),
    st.sampled_from(["largest", "slowest"]),
    st.sampled_from([{}, {"idle_after_s": 20.0}, {"idle_multiple": 3.0}]),
)


# -- destage: what holds for any view -----------------------------------------------------------------


@given(policies, st.lists(views(), min_size=1, max_size=4))
def test_what_is_suggested_frees_memory_and_leaves_the_bootstrap_part(
    policy: StandardDestage, seen: list[MemoryView]
) -> None:
    for look in seen:
        suggestions = policy.suggest(look)
        known = {w.name: w for w in look.windows}
        assert len(set(names(suggestions))) == len(suggestions)
        for suggestion in suggestions:
            assert suggestion.keep_bytes == known[suggestion.name].keep_bytes < known[suggestion.name].m_bytes
            assert suggestion.reason


@given(policies, views())
def test_the_same_look_twice_gives_the_same_answer(policy: StandardDestage, look: MemoryView) -> None:
    assert policy.suggest(look) == policy.suggest(look)


@given(policies, views())
def test_scarce_memory_takes_all_but_the_bootstrap_parts(policy: StandardDestage, look: MemoryView) -> None:
    assume(look.pressure >= policy.scarce)
    assert names(policy.suggest(look)) == [w.name for w in look.windows if w.m_bytes > w.keep_bytes]
    assert policy.pressed


@given(policies, views(), st.floats(0, 0.99))
def test_moderate_pressure_takes_just_as_many_as_bring_it_down_to_resume(
    policy: StandardDestage, look: MemoryView, between: float
) -> None:
    share = policy.moderate + between * (policy.scarce - policy.moderate)
    limit = max(1, int(look.used_bytes / share))
    look = replace(look, limit_bytes=limit, machine_share=min(look.machine_share, share))
    assume(policy.moderate <= look.pressure < policy.scarce)
    suggestions = policy.suggest(look)
    possible = {w.name for w in look.windows if w.m_bytes > w.keep_bytes}
    # The machine's memory shrinks with ours, as far as anyone knows.
    target = min(policy.resume * look.limit_bytes, policy.resume * look.used_bytes / (look.machine_share or 1e-9))
    if set(names(suggestions)) != possible:
        assert left_over(look, suggestions) <= target
    if suggestions and "idle" not in suggestions[-1].reason:
        assert left_over(look, suggestions[:-1]) > target, "one window more than was needed"


def left_over(look: MemoryView, suggestions: Sequence[Suggestion]) -> int:
    gains = {w.name: w.m_bytes - w.keep_bytes for w in look.windows}
    return look.used_bytes - sum(gains[s.name] for s in suggestions)


@given(policies, views())
def test_without_pressure_only_the_idle_leave(policy: StandardDestage, look: MemoryView) -> None:
    assume(look.pressure < policy.moderate)
    after_s = policy.idle_after_s or 1e9
    if policy.idle_multiple is not None and look.median_execution_s is not None:
        after_s = policy.idle_multiple * look.median_execution_s
    waits = [w for w in look.windows if w.due is None and w.m_bytes > w.keep_bytes]
    idle = {w.name for w in waits if look.now_s - w.last_append_s > after_s}
    assert set(names(policy.suggest(look))) == idle
    assert not policy.pressed


# -- destage: the order of victims, idleness ----------------------------------------------------------


def test_the_largest_go_first() -> None:
    policy = StandardDestage(victim="largest")
    look = view(window("a", 150), window("b", 400), window("c", 250, keep=200), window("d", 60))
    assert names(policy.suggest(look)) == ["b"]  # 860 of 1000, down to 460
    assert names(StandardDestage(victim="largest", resume=0.2).suggest(look)) == ["b", "a", "d", "c"]


def test_the_slowest_go_first() -> None:
    policy = StandardDestage(victim="slowest", resume=0.2)
    look = view(
        window("fast", 300, rate=9.0),
        window("slow", 100, rate=0.1),
        window("mid", 300, rate=2.0),
        window("mid too", 150, rate=2.0),
    )
    assert names(policy.suggest(look)) == ["slow", "mid", "mid too", "fast"]


def test_what_the_next_batches_read_leaves_last_and_what_they_read_first_at_the_very_end() -> None:
    windows = [replace(window(due, 200), due=due) for due in (1, 0, 2)]
    look = view(*windows, window("not due", 250))
    assert names(StandardDestage(resume=0.7).suggest(look)) == ["not due"]
    assert names(StandardDestage(resume=0.2).suggest(look)) == ["not due", 2, 1]


def test_what_the_next_batches_read_stays_when_the_pressure_is_moderate_no_more() -> None:
    policy = StandardDestage()
    assert names(policy.suggest(view(replace(window("due", 300), due=0), window("a", 500)))) == ["a"]
    due = replace(window("due", 600), due=0)
    assert names(policy.suggest(view(due, window("b", 100)))) == ["b"], "down to what resume says"
    assert policy.suggest(view(due, window("c", 0))) == []
    assert policy.suggest(view(due, window("d", 100))) == [], "it is over"
    assert names(policy.suggest(view(due, window("e", 200)))) == ["e"]


def test_a_window_that_is_due_is_not_idle() -> None:
    policy = StandardDestage(idle_after_s=10.0)
    assert names(
        policy.suggest(view(replace(window("due", 10, last_s=-99.0), due=3), window("a", 10, last_s=-11.0)))
    ) == ["a"]


def test_idle_windows_leave_and_count_for_the_pressure() -> None:
    policy = StandardDestage(idle_after_s=10.0)
    look = view(window("idle", 500, last_s=-11.0), window("busy", 350, last_s=-10.0))
    assert names(policy.suggest(look)) == ["idle"]  # with it gone, 350 of 1000 are in use
    policy = StandardDestage(idle_after_s=10.0, resume=0.3)
    assert names(policy.suggest(look)) == ["idle", "busy"]


def test_idleness_as_a_multiple_waits_for_the_first_execution() -> None:
    policy = StandardDestage(idle_multiple=3.0)
    old = window("old", 100, last_s=-10.0)
    assert policy.suggest(view(old, median_s=None)) == []
    assert policy.suggest(view(old, median_s=4.0)) == []
    assert names(policy.suggest(view(old, median_s=3.0))) == ["old"]


def test_the_reason_says_what_happened_and_what_stays() -> None:
    (suggestion,) = StandardDestage(keep_fraction=0.1).suggest(view(window("a", 800, keep=80)))
    assert suggestion.reason == "the largest window; 80% of memory is in use, the aim is 60%; the first 10.00% stay"
    (suggestion,) = StandardDestage().suggest(view(window("a", 950)))
    assert suggestion.reason == "memory is scarce: 95% of it is in use, and the limit is 90%"


def test_the_machine_presses_too_and_is_relieved_look_by_look() -> None:
    policy = StandardDestage()
    look = view(*(window(n, 10) for n in range(10)), machine=0.8)
    taken = []
    for machine in (0.8, 0.7, 0.65, 0.6, 0.65):
        look = replace(look, machine_share=machine)
        taken.append(len(policy.suggest(look)))
        look = after(look, policy.suggest(look))
    # A quarter of the memory in use must go: so must a quarter of ours; and again, as it was not enough.
    assert taken == [3, 1, 1, 0, 0]


def test_a_host_without_a_budget_yet() -> None:
    assert MemoryView(0.0, 0, 0, 0.4, None, []).pressure == 0.4
    assert MemoryView(0.0, 5, 0, 0.4, None, []).pressure == float("inf")
    assert names(StandardDestage().suggest(replace(view(window("a", 5)), limit_bytes=0))) == ["a"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"resume": 0.8}, {"moderate": 0.95}, {"scarce": 1.5}, {"resume": -0.1}, {"moderate": float("nan")},
        {"keep_fraction": 1.1}, {"idle_after_s": 1.0, "idle_multiple": 2.0}, {"idle_after_s": 0.0},
        {"idle_multiple": -1.0}, {"victim": "oldest"},
    ],
)  # fmt: skip
def test_thresholds_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|give one"):
        StandardDestage(**wrong)


def test_the_defaults_are_those_of_the_policy_file() -> None:
    policy, standard = StandardDestage(), config.Policy()
    for name in ("moderate", "resume", "scarce", "victim"):
        assert getattr(policy, name) == getattr(standard.memory, name)
    assert policy.keep_fraction == standard.destage.keep_fraction


# -- destage: hysteresis ------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1.2), min_size=1, max_size=30))
def test_between_the_thresholds_nothing_changes(pressures: list[float]) -> None:
    policy = StandardDestage(resume=0.5, moderate=0.75, scarce=0.9)
    for pressure in pressures:
        before = policy.pressed
        policy.suggest(replace(view(window("a", 1)), machine_share=pressure))
        if 0.5 < pressure < 0.75:
            assert policy.pressed == before
        else:
            assert policy.pressed == (pressure >= 0.75)


@given(st.lists(st.integers(0, 120), min_size=1, max_size=60), st.integers(0, 3))
def test_it_does_not_flap_while_events_keep_coming(appends: list[int], keep: int) -> None:
    """From one start of the pressure to the next, at least the distance of the thresholds was appended."""
    policy = StandardDestage(resume=0.5, moderate=0.75, scarce=0.9)
    look = view(*(window(n, 0, keep=keep) for n in range(6)))
    since_start: int | None = None
    for number, appended in enumerate(appends):
        windows = list(look.windows)
        windows[number % 6] = replace(windows[number % 6], m_bytes=windows[number % 6].m_bytes + appended)
        look = replace(look, windows=windows, used_bytes=look.used_bytes + appended)
        before = policy.pressed
        look = after(look, policy.suggest(look))
        if since_start is not None:
            since_start += appended
        if policy.pressed and not before:
            assert since_start is None or since_start >= (0.75 - 0.5) * LIMIT
            since_start = 0
        assert look.used_bytes < 0.75 * LIMIT, "what was suggested is enough"


def test_once_begun_it_goes_on_until_resume_is_reached() -> None:
    """Writes take their time: the memory counts until it has left, and nothing new is asked for meanwhile."""
    policy = StandardDestage()
    full = view(*(window(n, 100 - n) for n in range(8)))
    first = policy.suggest(full)
    assert names(first) == [0, 1]
    assert policy.suggest(full) == first
    half_way = after(full, first[:1])
    assert half_way.pressure < policy.moderate
    assert names(policy.suggest(half_way)) == [1]
    done = after(half_way, first[1:])
    assert policy.suggest(done) == []
    assert not policy.pressed
    assert policy.suggest(half_way) == []


# -- prestage -----------------------------------------------------------------------------------------


sizes = st.integers(1, 1 << 40)
times = st.floats(0, 1e6)


@given(st.lists(st.tuples(sizes, times)), sizes, st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_prestaging_never_starts_later_than_it_is_expected_to_take(
    seen: list[tuple[int, float]], size: int, due_s: float, pessimistic_s: float
) -> None:
    plan = JustInTimePrestage()
    for observed in seen:
        plan.observe(*observed)
    start_s, estimate_s = plan.start_at_s(due_s, size, pessimistic_s), plan.speed.estimate_s(size)
    assert start_s <= due_s
    if estimate_s is None:
        assert start_s == min(pessimistic_s, due_s)
    else:
        assert estimate_s >= 0
        assert start_s <= due_s - estimate_s


def test_the_first_time_is_pessimistic_and_then_just_early_enough() -> None:
    plan = JustInTimePrestage()
    assert plan.start_at_s(100.0, 1000, 40.0) == 40.0
    assert plan.start_at_s(100.0, 1000, 140.0) == 100.0
    plan.observe(1000, 2.0)
    assert plan.start_at_s(100.0, 1000, 40.0) == pytest.approx(98.0)


@given(st.integers(1, 1 << 40), st.floats(1e-3, 1e3), st.integers(1, 20))
def test_a_constant_speed_is_learnt_exactly(size: int, seconds: float, often: int) -> None:
    speed = StagingSpeed()
    for _ in range(often):
        speed.observe(size, seconds)
    assert speed.estimate_s(size) == pytest.approx(seconds)
    assert speed.deviation_s(size) == pytest.approx(0, abs=seconds * 1e-9)
    assert speed.bytes_per_s(size) == pytest.approx(size / seconds)


@given(st.floats(0.01, 1.0), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30))
def test_the_estimate_lies_among_what_was_observed(weight: float, seconds: list[float]) -> None:
    speed = StagingSpeed(weight)
    for took in seconds:
        speed.observe(4096, took)
    estimate_s = speed.estimate_s(4096)
    assert estimate_s is not None
    assert min(seconds) * 0.999 <= estimate_s <= max(seconds) * 1.001


def test_a_new_speed_is_followed() -> None:
    speed = StagingSpeed()
    for _ in range(20):
        speed.observe(1 << 20, 1.0)
    for _ in range(20):
        speed.observe(1 << 20, 3.0)
    assert speed.estimate_s(1 << 20) == pytest.approx(3.0, rel=0.01)


def test_each_class_of_sizes_has_its_speed_and_lends_it_to_larger_ones() -> None:
    speed = StagingSpeed()
    speed.observe(1024, 1.0)  # 1 KiB a second: fixed costs
    speed.observe(1 << 20, 1.0)
    assert speed.estimate_s(2047) == pytest.approx(2047 / 1024)
    assert speed.estimate_s(512 << 10) == pytest.approx(512.0)  # not seen: the slower class below
    assert speed.estimate_s(1 << 30) == pytest.approx(1024.0)
    assert speed.estimate_s(1023) is None
    assert speed.bytes_per_s(1023) is None
    assert speed.deviation_s(1023) == 0.0
    assert speed.estimate_s(0) == 0.0


def test_nothing_is_learnt_from_nothing() -> None:
    speed = StagingSpeed()
    speed.observe(0, 1.0)
    speed.observe(100, -1.0)
    assert speed.estimate_s(100) is None
    speed.observe(100, 0.0)  # faster than the clock can tell
    assert speed.estimate_s(100) == 0.0
    assert speed.bytes_per_s(100) is None


def test_the_margin_covers_a_disk_whose_speed_varies() -> None:
    dice = random.Random(7)
    late = {0.0: 0, 2.0: 0}
    for margin in late:
        plan = JustInTimePrestage(margin=margin)
        for _ in range(1000):
            took_s = dice.lognormvariate(0.0, 0.3)
            start_s = plan.start_at_s(0.0, 1 << 20, -1e9)
            late[margin] += start_s + took_s > 0
            plan.observe(1 << 20, took_s)
    assert late[0.0] > 300
    assert late[2.0] < 100


@pytest.mark.parametrize("weight", [0.0, 1.1, float("nan")])
def test_a_weight_that_makes_no_sense_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        StagingSpeed(weight)


def test_a_margin_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        JustInTimePrestage(margin=-1.0)


# -- a user's own -------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_policy.py").write_text(
        "class Outer:\n"
        "    class Keep:\n"
        "        def __init__(self, names=()):\n"
        "            self.names = names\n"
        "        def suggest(self, view):\n"
        "            return []\n"
        "class Mute:\n"
        "    suggest = None\n"
    )
    (tmp_path / "users_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("users_policy", "users_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "users_policy"


def test_a_class_of_the_user_is_made_from_its_arguments(module: str) -> None:
    arguments = config.Arguments({"names": ["a", "b"]})
    policy = backends.build(f"{module}:Outer.Keep", arguments, methods=["suggest"])
    assert policy.names == ["a", "b"]
    assert policy.suggest(view()) == []


@pytest.mark.parametrize(
    ("class_path", "arguments", "says"),
    [
        ("no.such.module:X", {}, r"no.such.module:X cannot be imported \(ModuleNotFoundError"),
        ("users_policy:Missing", {}, r"cannot be imported \(AttributeError.*write package.module:Class"),
        ("users_broken:X", {}, r"cannot be imported \(ZeroDivisionError"),
        ("users_policy:Outer.Keep", {"limit": 5}, r"cannot be made with limit=5 \(TypeError"),
        ("users_policy:Mute", {}, r"is no policy of this kind: it lacks suggest\(\)"),
    ],
)
def test_a_class_that_will_not_do_is_refused(
    module: str, class_path: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        backends.build(class_path, arguments, methods=["suggest"])


def test_the_built_in_policies_can_be_named_as_well() -> None:
    made = backends.build("policies.destage:StandardDestage", {"resume": 0.1}, methods=["suggest"])
    assert made == StandardDestage(resume=0.1)
    backends.build("policies.prestage:JustInTimePrestage", {"margin": 1.0}, methods=["start_at_s", "observe"])
