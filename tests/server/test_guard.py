"""A user's own policies in the state server: whatever they do, the state is safe and the built-in ones go on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aion import errors
from policies.destage import MemoryView, StandardDestage, Suggestion, WindowView
from policies.prestage import JustInTimePrestage
from policies.sizing import Execution
from state_backends.backends import StoreConfig
from state_backends.server.guard import Guard, GuardedDestage, GuardedPrestage
from tests.server.conftest import Connect, block, open_shard, server_of, snapshot, values

FULL = MemoryView(
    now_s=100.0,
    used_bytes=95,
    limit_bytes=100,
    machine_share=0.1,
    median_execution_s=None,
    windows=[WindowView("w", 95, 0, 0, False, 0.0, 1.0)],
)
BUILT_IN = StandardDestage().suggest(FULL)
assert [s.name for s in BUILT_IN] == ["w"]


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard(answer_s=0.2)
    yield guard
    guard.close()


class Policy:
    """Answers with what it is told to, or does it."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.asked = 0

    def suggest(self, view: MemoryView) -> Any:
        self.asked += 1
        return self.answer()

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> Any:
        self.asked += 1
        return self.answer()

    def observe(self, size_bytes: int, seconds: float) -> None:
        self.answer()


def test_an_answer_is_the_policys_own(guard: Guard) -> None:
    mine = [Suggestion("w", 3, "mine")]
    assert GuardedDestage(guard, "mine:Policy", Policy(lambda: iter(mine))).suggest(FULL) == mine
    assert GuardedPrestage(guard, "mine:Policy", Policy(lambda: 17)).start_at_s(20.0, 1, 10.0) == 17.0


def raises(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def endless() -> Iterable[Any]:
    yield object()


@pytest.mark.parametrize(
    "answer",
    [
        raises(ZeroDivisionError("division by zero")),
        raises(SystemExit(3)),
        raises(KeyboardInterrupt()),
        raises(TimeoutError("mine")),
        raises(MemoryError()),
        raises(RecursionError()),
        lambda: None,
        lambda: 5,
        lambda: [None],
        lambda: [Suggestion([], 0, "a name that is none")],
        lambda: [Suggestion("w", "all", "no bytes")],  # type: ignore[arg-type]
        endless,
    ],
)
def test_what_is_no_answer_is_logged_and_the_built_in_policy_answers(
    guard: Guard, answer: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    guarded = GuardedDestage(guard, "mine:Policy", Policy(answer))
    assert guarded.suggest(FULL) == BUILT_IN
    assert "mine:Policy.suggest() failed, so the built-in policy answers instead" in caplog.text
    assert guarded.suggest(FULL) == BUILT_IN  # and goes on doing so


@pytest.mark.parametrize("answer", [lambda: None, lambda: "soon", lambda: float("nan"), raises(ValueError())])
def test_a_time_that_is_none_is_the_built_in_ones(guard: Guard, answer: Callable[[], Any]) -> None:
    guarded, built_in = GuardedPrestage(guard, "mine:Policy", Policy(answer)), JustInTimePrestage()
    for known in (guarded, built_in):
        known.observe(1000, 0.5)  # of which the guarded one's answer fails, and nobody is told
    assert guarded.start_at_s(20.0, 2000, 3.0) == built_in.start_at_s(20.0, 2000, 3.0)


def test_one_that_hangs_is_not_waited_for_twice_and_asked_again_when_it_is_back(guard: Guard) -> None:
    back = threading.Event()
    mine = [Suggestion("w", 3, "mine")]

    def hang() -> list[Suggestion]:
        back.wait()
        return mine

    policy = Policy(hang)
    guarded = GuardedDestage(guard, "mine:Policy", policy)
    for _ in range(50):
        assert guarded.suggest(FULL) == BUILT_IN
    assert policy.asked == 1
    back.set()
    while guarded.suggest(FULL) != mine:
        pass
    assert policy.asked >= 2


def test_one_that_hangs_when_it_is_told_something_holds_up_nobody(guard: Guard) -> None:
    back = threading.Event()
    guarded = GuardedPrestage(guard, "mine:Policy", Policy(back.wait))
    for _ in range(1000):
        guarded.observe(1, 1.0)  # the I/O thread's
    assert guarded.start_at_s(20.0, 1, 10.0) == pytest.approx(19.0)  # by the built-in one, which has seen it all
    back.set()


def test_a_class_that_hangs_when_it_is_made_is_refused(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backends.server.guard.MAKING_SECONDS", 0.1)
    back = threading.Event()
    with pytest.raises(ValueError, match=r"was not made within 0\.1 s"):
        guard.make(back.wait)
    back.set()
    with pytest.raises(ValueError, match="tried to end the process"):
        guard.make(raises(SystemExit(1)))


PLUGIN = """
import os, time
class Destage:
    def __init__(self, how): self.how = how
    def suggest(self, view):
        if self.how == "raise": raise ZeroDivisionError("mine")
        if self.how == "hang": time.sleep(1e6)
        if self.how == "spin":
            while True: pass
        if self.how == "exit": raise SystemExit(1)
class Prestage(Destage):
    def start_at_s(self, due_s, size_bytes, pessimistic_s): return self.suggest(None)
    def observe(self, size_bytes, seconds): self.suggest(None)
class Broken:
    def __init__(self): raise ValueError("cannot be made")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "hang", "spin", "exit"])
def test_in_a_server_nothing_is_lost_by_a_policy_that(
    how: str, application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    store = StoreConfig(
        budget_bytes=1 << 20,
        bucket_limit_bytes=1 << 19,
        destage_class="mine:Destage",
        destage={"how": how},
        prestage_class="mine:Prestage",
        prestage={"how": how},
    )
    client = connect()
    server = server_of(application)
    token, expected = None, []
    for number in range(4):
        attempt = open_shard(client, tmp_path, token, token := f"t{number}", store=store)
        # More than the budget: the rest must go to the disk, whatever the policy says.
        for seq in range(5 * number, 5 * number + 5):
            attempt.append([(seq, seq % 2 == 0, block(*[seq] * 20_000, slice_us=seq))])
            expected += [seq] * 20_000
        assert values(attempt, *range(20)) == expected
        attempt.release([5 * number], [])
        attempt.commit(snapshot(5 * number + 5), prestage=[0, 1, 2], executions=[Execution(1000, 0.1, 0.0)])
    assert values(open_shard(client, tmp_path, token, "last", store=store), *range(20)) == expected
    assert client.stats()["m_bucket_bytes"] <= 1 << 20
    assert server_of(application) == server


@pytest.mark.slow
def test_a_class_that_cannot_be_used_is_refused_by_name(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    client = connect()
    for path in ("mine:Broken", "mine:Missing", "nowhere:Class"):
        with pytest.raises(errors.PolicyError, match=path):
            open_shard(client, tmp_path, None, "t1", store=StoreConfig(destage_class=path))
    open_shard(client, tmp_path, None, "t1").append([(0, False, block(1))])  # and the server is as good as before


@pytest.mark.slow
def test_a_policy_counts_even_if_an_operator_without_a_disk_came_first(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    in_memory = StoreConfig(backend="memory", prestages=False)
    open_shard(client, tmp_path, None, "t1", store=in_memory).abort()
    with pytest.raises(errors.PolicyError, match="nowhere:Destage cannot be imported"):
        open_shard(client, tmp_path, None, "t2", shard=1, store=StoreConfig(destage_class="nowhere:Destage"))
