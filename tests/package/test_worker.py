"""What a task asks of the Python worker that runs it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from aion.errors import ApplyError, StorageError
from aion.spark.tasks import worker


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.unfreeze()
    monkeypatch.setattr(worker, "_modules", 0)
    yield
    gc.unfreeze()


def test_what_modules_hold_is_looked_at_once() -> None:
    held = len(gc.get_objects())
    worker.begin_task()
    assert gc.get_freeze_count() >= held
    assert len(gc.get_objects()) < held / 10


def test_what_a_task_leaves_is_looked_at_until_it_loads_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    worker.begin_task()
    left: list[list[int]] = [[] for _ in range(1_000)]
    worker.begin_task()
    assert looked_at(left) == len(left)
    monkeypatch.setitem(sys.modules, "a_module_of_a_task", ModuleType("a_module_of_a_task"))
    worker.begin_task()
    assert looked_at(left) == 0


def looked_at(left: list[list[int]]) -> int:
    """How many of these Python looks at for cycles. The number of frozen objects says less: some are freed."""
    seen = {id(found) for found in gc.get_objects()}
    return sum(id(one) in seen for one in left)


def test_the_users_calls_are_shown_without_ours_and_not_all_of_many() -> None:
    def even(number: int) -> None:
        if number == 0:
            raise ValueError("none left")
        odd(number - 1)

    def odd(number: int) -> None:
        even(number - 1)

    with pytest.raises(ApplyError) as found:
        try:
            even(20)
        except ValueError as error:
            raise ApplyError("apply for key 1: ValueError: none left") from error
    lines = worker.users_calls(found.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == '    raise ValueError("none left")'
    assert "  ... 16 more calls" in lines
    assert len(lines) <= 15


def test_an_error_that_no_function_of_the_user_raised_has_no_calls() -> None:
    with pytest.raises(StorageError) as found:
        try:
            raise OSError("no such bucket")
        except OSError as error:
            raise StorageError("no such bucket") from error
    assert worker.users_calls(found.value) == ""
    assert worker.users_calls(ApplyError("returned 1")) == ""
