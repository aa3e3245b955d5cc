"""A shard that comes back on its host: under another policy, from another place, with nothing of it in memory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import load_policy, policy_to_text
from aion.core.query.plan import make_plan
from aion.execute.assembly import make_builder, make_operator
from aion.execute.executor import Executor
from aion.execute.panes.contents import RowContents
from state_backends.backends import StoreConfig
from state_backends.format.block import Block
from state_backends.server import requests
from state_backends.server.host import Host
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import Only, StoredBlock
from tests.stores.rig import Rig, make_block

SECOND = 1_000_000
CONFIG = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=1 << 18)


class OneHost:
    """A host as the state server has it, and the attempts of one shard on it."""

    def __init__(self) -> None:
        self.host = Host()
        self.attempts = 0

    def open(self, place: Path, config: StoreConfig, token: str | None, **told: bool) -> tuple[str, dict[str, Any]]:
        """An attempt, and what its opening answered."""
        self.attempts += 1
        attempt = f"{self.attempts:010d}-attempt"
        request = {
            "identity": {"query": "q", "operator": "o", "shard": 0, "shards": 1, "definition": {}},
            "store": config.to_json(),
            "state_dir": str(place),
            "run": "r",
            "operator_uid": "u",
            "others": False,
            "token": token,
            "makes": attempt,
            "attempt": attempt,
            **told,
        }
        return attempt, self.host.open(requests.OpenRequest.model_validate_json(orjson.dumps(request)))

    def commit(self, attempt: str, *seqs: int) -> str:
        _, shard, _ = self.host.attempts.find(attempt, self.host.attempts.server)
        shard.append(attempt, [(seq, False, make_block(0, seq, 1000)) for seq in seqs])
        shard.commit(attempt, {"next_seq": max(seqs) + 1, "counters": {}})
        return attempt

    def seqs(self, attempt: str) -> list[int]:
        _, shard, _ = self.host.attempts.find(attempt, self.host.attempts.server)
        return [seq for seq, _ in shard.read(attempt, [0])]


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneHost]:
    one = OneHost()
    yield one
    one.host.close()
    assert not list(tmp_path.glob("*/.live")), "nothing of RocksDB's own is left"


def test_the_same_policy_and_place_are_the_same_shard(one: OneHost, tmp_path: Path) -> None:
    attempt, answer = one.open(tmp_path / "state", CONFIG, None)
    assert (answer["snapshot"], answer["rebuilt"]) == (None, True)
    token = one.commit(attempt, 0, 1)
    attempt, answer = one.open(tmp_path / "state", StoreConfig(**CONFIG.to_json()), token)
    assert not answer["rebuilt"]
    assert one.seqs(attempt) == [0, 1]


@pytest.mark.parametrize(
    "changed",
    [{"backend": "rocksdb"}, {"backend": "memory"}, {"bucket_limit_bytes": 100}, {"retain_versions": 3}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_policy_finds_the_same_state(one: OneHost, tmp_path: Path, changed: dict[str, Any]) -> None:
    token = one.commit(one.open(tmp_path / "state", CONFIG, None)[0], 0, 1)
    zombie, _ = one.open(tmp_path / "state", CONFIG, token)
    other = StoreConfig(**{**CONFIG.to_json(), **changed})
    attempt, answer = one.open(tmp_path / "state", other, token)
    assert (answer["snapshot"], answer["rebuilt"]) == ({"next_seq": 2, "counters": {}}, True)
    assert one.seqs(attempt) == [0, 1]
    with pytest.raises(aion.errors.AttemptSuperseded):
        one.commit(zombie, 2)
    token = one.commit(attempt, 2)
    attempt, answer = one.open(tmp_path / "state", other, token)
    assert not answer["rebuilt"]
    assert one.seqs(attempt) == [0, 1, 2]


def test_state_that_was_moved_is_found_where_it_is_now(one: OneHost, tmp_path: Path) -> None:
    token = one.commit(one.open(tmp_path / "state", CONFIG, None)[0], 0)
    shutil.copytree(tmp_path / "state" / "q", tmp_path / "moved" / "q")
    shutil.rmtree(tmp_path / "state" / "q")
    attempt, answer = one.open(tmp_path / "moved", CONFIG, token)
    assert answer["rebuilt"]
    assert one.seqs(attempt) == [0]
    one.commit(attempt, 1)
    assert not (tmp_path / "state" / "q").exists()


def test_who_asks_is_told_once_what_the_disk_took(one: OneHost, tmp_path: Path) -> None:
    first, second, third = (make_block(0, seq, 1000).size_bytes for seq in range(3))
    attempt, answer = one.open(tmp_path / "state", CONFIG, None)
    assert "disk_times" not in answer
    attempt, _ = one.open(tmp_path / "state", CONFIG, one.commit(attempt, 0, 1))
    _, shard, _ = one.host.attempts.find(attempt)
    shard.store.destage([0])
    shard.prestage(attempt, [0])
    token = one.commit(attempt, 2)
    _, answer = one.open(tmp_path / "state", CONFIG, token, disk_times=True)
    staged, written = answer["disk_times"]["staged"], answer["disk_times"]["written"]
    assert [size for size, _, _ in staged] == [first + second]
    assert [size for size, _ in written] == [first + second, third]
    assert all(seconds > 0 for _, seconds in written)
    assert all(seconds >= waited_s >= 0 for _, seconds, waited_s in staged)
    _, answer = one.open(tmp_path / "state", CONFIG, token, disk_times=True)
    assert answer["disk_times"] == {"staged": [], "written": []}


# -- memory comes back -------------------------------------------------------------------------------------------


def test_prestaging_keeps_the_order_that_it_was_given(tmp_path: Path) -> None:
    with contextlib.closing(Rig("tiered", tmp_path, budget=11_100)) as rig:
        for slice_ in range(4):
            rig.append((slice_, slice_), size=3000)
        rig.to_disk(*range(4))
        rig.store.prestage([2, 3, 0, 1])
        rig.settle()
        assert {view["name"] for view in rig.store.views()} == {2, 3}, "as many as there is room for"
        assert rig.read(2, 3) == [2, 3]
        assert (rig.store.stats().staging.hits, rig.store.stats().staging.misses) == (2, 0)


class Attempt:
    """An attempt that remembers what it was asked to prestage."""

    def __init__(self, snapshot: dict[str, Any] | None = None, *, rebuilt: bool = False) -> None:
        self.snapshot, self.rebuilt = snapshot, rebuilt
        self.prestaged: list[Sequence[int]] = []
        self.others, self.learnt = (0, ()), None

    def append(self, blocks: Any) -> None:
        for _ in blocks:
            pass

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        return iter(())

    def prestage(self, slices: Sequence[int]) -> None:
        self.prestaged.append(slices)

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        pass


SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("v", pa.int64())])
POLICY = load_policy({"lateness": {"initial_bound": "1h"}})


def plan_of(windows: Any) -> Any:
    how: dict[str, Any] = {"aggregates": {"n": A.count()}, "apply": None, "outputs": None}
    return make_plan(SCHEMA, key=None, time="ts", windows=windows, **how)


def at_work(plan: Any, seconds: Sequence[int], watermark_s: int) -> Executor:
    """A shard with an event at each of these seconds, and then the watermark."""
    pool = CodecPool(0)
    executor = Executor(plan, make_operator(plan, POLICY, None), Attempt(), RowContents(plan, pool))
    table = pa.table([[s * SECOND for s in seconds], list(seconds)], schema=SCHEMA)
    builder = make_builder(plan, POLICY, pool, ShardOfKeys([0]))
    blocks: list[Block] = [b.block for batch in table.to_batches() for b in builder.add(batch)]
    list(executor.arrive(blocks + [b.block for b in builder.finish()]))
    list(executor.advance(watermark_s * SECOND))
    pool.close()
    return executor


def test_what_active_windows_need_comes_back_by_when_it_is_needed() -> None:
    # Of a day's window the old slices are needed last, however old they are.
    windows = {"day": aion.Tumbling("1 day"), "ten": aion.Tumbling("10 seconds")}
    executor = at_work(plan_of(windows), [1, 12, 23, 34, 35], 20)
    assert executor.operator.active_slices() == (20 * SECOND, 30 * SECOND, 0, 10 * SECOND)
    sliding = at_work(plan_of(aion.Sliding("20 seconds", "10 seconds")), [1, 12, 23, 34], 20)
    assert sliding.operator.active_slices() == (10 * SECOND, 20 * SECOND, 30 * SECOND), (
        "the first one is nobody's that is active"
    )
    assert at_work(plan_of(aion.Tumbling("10 seconds")), [1, 12], 20).operator.active_slices() == ()


@pytest.mark.parametrize("rebuilt", [True, False])
def test_a_shard_that_was_rebuilt_asks_for_its_active_windows(rebuilt: bool) -> None:
    from aion.spark.tasks.root_config import RootConfig
    from aion.spark.tasks.tenants import Batch
    from aion.spark.tasks.windows_task import WindowsTenants

    plan = plan_of(aion.Tumbling("10 seconds"))
    snapshot = at_work(plan, [1, 12, 23, 34], 20).operator.snapshot()
    config = RootConfig(
        plan=plan,
        policy=policy_to_text(POLICY),
        name="o",
        uid="u",
        application="a",
        state_dir="s",
        ids=(0,),
        key_types=(),
        task_failures=4,
        retain_versions=2,
        watermark_delay_us=None,
    )
    attempt, tenants = Attempt(snapshot, rebuilt=rebuilt), WindowsTenants(config, POLICY)
    tenants.open(attempt, Batch(0, 0, "q", None, 0, None))  # type: ignore[arg-type]
    tenants.close()
    assert attempt.prestaged == ([(20 * SECOND, 30 * SECOND)] if rebuilt else [])


def test_a_checkpoint_still_fits_what_spark_keeps_of_a_shard() -> None:
    """Spark compares the name and the schema of a state variable with those of the checkpoint."""
    from aion.spark.tasks.processor import ProcessorDefinition
    from aion.spark.tasks.windows import WindowsDefinition

    kept = {kind.STATE: kind.schema().simpleString() for kind in (WindowsDefinition, ProcessorDefinition)}
    assert kept == {
        "state": "struct<token:string,timer_ms:bigint>",
        "__aion_shard": "struct<token:string,timer_ms:bigint,seen_ms:bigint,due_ms:bigint>",
    }


def test_state_that_is_copied_while_its_server_lives_is_opened_by_the_same_server(one: OneHost, tmp_path: Path) -> None:
    """The copy has the server's own working folder in it, files and all."""
    attempt, _ = one.open(tmp_path / "state", CONFIG, None)
    token = one.commit(attempt, 0)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    assert list((tmp_path / "copy" / ".live").rglob("*"))
    attempt, _ = one.open(tmp_path / "copy", CONFIG, token)
    assert one.seqs(attempt) == [0]
    copied = one.commit(attempt, 1)
    attempt, _ = one.open(tmp_path / "state", CONFIG, token)
    assert one.seqs(attempt) == [0]
    attempt, _ = one.open(tmp_path / "copy", CONFIG, copied)
    assert one.seqs(attempt) == [0, 1]


def test_two_paths_of_one_folder_share_the_servers_working_folder(one: OneHost, tmp_path: Path) -> None:
    attempt, _ = one.open(tmp_path / "state", CONFIG, None)
    token = one.commit(attempt, 0)
    (tmp_path / "link").symlink_to(tmp_path / "state")
    attempt, _ = one.open(tmp_path / "link", CONFIG, token)
    token = one.commit(attempt, 1)
    attempt, _ = one.open(tmp_path / "state", CONFIG, token)
    assert one.seqs(attempt) == [0, 1]
