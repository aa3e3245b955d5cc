"""Bodies of handed-over blocks that are read together: who waits for whom."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backends.files.bodies import Places, staged_name
from state_backends.files.handed import HandedFile
from state_backends.format.block import Block, BodyAt
from state_backends.store import body_files
from state_backends.store.body_files import BodyFiles
from state_backends.store.io import Steps
from state_backends.store.waiting import Waits
from tests.stores.rig import make_block

NAME = "0000000000-0000000000-c0ffee-a.bodies"
PIECE = 1000


class Source:
    """A shard's storage. The file is in a folder of this host, or elsewhere; then the test answers."""

    def __init__(self, folder: Path, *, is_local: bool) -> None:
        self._file = folder / NAME
        self.bodies = Places([str(folder)] if is_local else [])
        self.asked: list[tuple[BodyAt, int, Future[bytes]]] = []

    def body_of(self, at: BodyAt, size: int) -> Future[bytes]:
        self.asked.append((at, size, Future()))
        return self.asked[-1][2]

    def answer(self, number: int = 0) -> None:
        at, size, future = self.asked[number]
        future.set_result(self._file.read_bytes()[at.offset :][:size])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[BodyFiles, Source, list[Block]]]:
    monkeypatch.setattr(body_files, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(body_files, "MOST_TOGETHER_BYTES", 1 << 20)
    monkeypatch.setattr(body_files, "are_resident", lambda path, ranges: [False] * len(ranges))

    def made(is_local: bool) -> tuple[BodyFiles, Source, list[Block]]:
        with closing(HandedFile(tmp_path / "here", NAME)) as file:
            references = [file.add(make_block(n, n, 3000)) for n in range(3)]
            file.end()
            file.seal()
        source = Source(tmp_path / "here", is_local=is_local)
        bodies = BodyFiles(tmp_path / "staged", lambda: source)
        for reference in references:
            bodies.expect(reference)
        return bodies, source, references

    return made


def run(steps: Steps[Any]) -> Any:
    """Runs steps, and asserts that none of them waits for another thread."""
    while True:
        try:
            assert not isinstance(next(steps), Waits)
        except StopIteration as stop:
            return stop.value


def body(number: int) -> bytes:
    return bytes(make_block(number, number, 3000).body)


def test_a_body_that_has_become_urgent_does_not_wait_for_its_neighbours(make: Any) -> None:
    """They are on their way with less urgency, and a commit of another shard may go first."""
    bodies, _, (first, second, third) = make(True)
    staging = bodies.stage(first)
    assert next(staging) == PIECE, "the first piece of all three"
    assert bytes(run(bodies.read(second)).body) == body(1)
    assert run(staging) is True
    assert run(bodies.stage(third)) is True
    assert sorted(path.read_bytes() for path in (bodies._folder or Path()).iterdir()) == sorted([body(0), body(2)])


def test_one_request_brings_neighbours_and_each_goes_on_when_it_is_answered(make: Any) -> None:
    bodies, source, (first, second, third) = make(False)
    staging, reading = bodies.stage(first), bodies.read(second)
    assert isinstance(next(staging), Waits) and isinstance(next(reading), Waits)
    assert len(source.asked) == 1
    source.answer()
    assert bytes(run(reading).body) == body(1), "though the request that asked for it has not run since"
    assert run(staging) is True and run(bodies.stage(third)) is True
    assert len(source.asked) == 1, "each byte once"


@pytest.mark.parametrize("is_local", [True, False])
def test_a_request_that_is_cancelled_leaves_its_neighbours_to_themselves(make: Any, is_local: bool) -> None:
    bodies, source, (first, second, _) = make(is_local)
    staging = bodies.stage(first)
    next(staging)
    staging.close()
    bodies.forget(first)
    reading = bodies.read(second)
    if not is_local:
        source.asked[0][2].cancel()
        assert isinstance(next(reading), Waits)
        source.answer(1)
    assert bytes(run(reading).body) == body(1)


@pytest.mark.parametrize("is_local", [True, False])
@given(data=st.data())
def test_any_order_of_steps_gives_the_same_bodies(is_local: bool, data: st.DataObject) -> None:
    """The test is the I/O thread: it chooses which request takes a step, and which answer comes.

    Sizes are tiny. Requests are cancelled at any step. A staged body stays as it was for who has mapped it.
    """
    with tempfile.TemporaryDirectory(prefix="aion-test-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_files, "PIECE_BYTES", data.draw(st.sampled_from([1, 700, PIECE, 1 << 20])))
        patch.setattr(body_files, "GAP_BYTES", data.draw(st.sampled_from([0, 64, 8000])))
        patch.setattr(body_files, "MOST_TOGETHER_BYTES", data.draw(st.sampled_from([1, 7000, 1 << 20])))
        patch.setattr(body_files, "are_resident", lambda path, ranges: [False] * len(ranges))
        folder, staged = Path(name) / "here", Path(name) / "staged"
        count = data.draw(st.integers(1, 5))
        sizes = [data.draw(st.sampled_from([0, 900, 3000])) for _ in range(count)]
        with closing(HandedFile(folder, NAME)) as file:
            references = [file.add(make_block(n, n, size)) for n, size in enumerate(sizes)]
            file.end()
            file.seal()
        expected = [bytes(make_block(n, n, size).body) for n, size in enumerate(sizes)]
        source = Source(folder, is_local=is_local)
        bodies = BodyFiles(staged, lambda: source)
        under_way: dict[int, tuple[bool, Steps[Any]]] = {}
        for n, reference in enumerate(references):
            bodies.expect(reference)
            stages = data.draw(st.booleans())
            under_way[n] = stages, bodies.stage(reference) if stages else bodies.read(reference)
        waits: dict[int, Future[Any]] = {}
        mapped: dict[int, mmap.mmap] = {}
        while under_way:
            runnable = [n for n in under_way if n not in waits or waits[n].done()]
            unanswered = [at for at, (_, _, future) in enumerate(source.asked) if not future.done()]
            what = data.draw(
                st.sampled_from([*(["step"] * 4 if runnable else []), *["answer"] * bool(unanswered), "cancel"])
            )
            if what == "answer":
                source.answer(data.draw(st.sampled_from(unanswered)))
                continue
            n = data.draw(st.sampled_from(runnable if what == "step" else sorted(under_way)))
            stages, steps = under_way[n]
            if what == "cancel":
                steps.close()
            else:
                try:
                    step = next(steps)
                    waits.pop(n, None)
                    if isinstance(step, Waits):
                        waits[n] = step.until
                    continue
                except StopIteration as stop:
                    if stages:
                        assert stop.value is True
                        at = references[n].at
                        assert at is not None
                        with (staged / staged_name(at)).open("rb") as whole:
                            mapped[n] = mmap.mmap(whole.fileno(), 0, prot=mmap.PROT_READ)
                        if data.draw(st.booleans()):
                            bodies.unstage(at)
                    else:
                        assert bytes(stop.value.body) == expected[n]
            del under_way[n]
            bodies.forget(references[n])
        assert not list(staged.glob("*.part")), "a body is there whole, or not at all"
        bodies.close()
        assert not staged.exists() and {n: body[:] for n, body in mapped.items()} == {n: expected[n] for n in mapped}
