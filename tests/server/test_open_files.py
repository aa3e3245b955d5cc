"""State servers that may have few files open: the kernel's real limits, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, sys, uuid
from pathlib import Path
soft, hard, shards, state = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from aion.errors import AionError
from state_backends.server.client import StateClient, runtime_dir
from tests.server.conftest import STORE, block, open_shard, server_of, snapshot, values
application = f"test-{uuid.uuid4()}"
client = StateClient.connect(application, watch_pid=os.getpid())
made = 0
try:
    for shard in range(shards):
        attempt = open_shard(client, state, None, f"t{shard}", shard=shard)
        attempt.append([(0, False, block(shard))])
        attempt.commit(snapshot(1))
        made += 1
    for shard in range(0, made, 10):
        assert values(open_shard(client, state, f"t{shard}", f"u{shard}", shard=shard), 0) == [shard]
except AionError as error:
    print(type(error).__name__, error)
print("made", made)
print("open", len(os.listdir(f"/proc/{server_of(application).pid}/fd")))
print((runtime_dir(application) / "log").read_text())
client.close()
"""


def run(soft: int, hard: int, shards: int, folder: Path) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, *map(str, (soft, hard, shards)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("begins", "shards"), [(128, 50), pytest.param(256, 200, marks=pytest.mark.proof)])
def test_a_server_takes_as_many_as_the_system_lets_it(tmp_path: Path, begins: int, shards: int) -> None:
    """Two hundred shards are as many as Spark makes unless the user says otherwise. Processes begin with 256 files."""
    assert f"made {shards}" in run(begins, 4096, shards, tmp_path)


@pytest.mark.slow
def test_too_few_are_said_to_be_so(tmp_path: Path) -> None:
    lines = run(128, 160, 30, tmp_path)
    (said,) = [line for line in lines if line.startswith(("DiskError", "ServerError"))]  # whichever needs one first
    assert "Too many open files" in said and "ulimit -n" in said
    assert any("this server may open 160 files, enough for about 10 shards" in line for line in lines)
    (made,) = [int(line.split()[1]) for line in lines if line.startswith("made")]
    assert made >= 10


@pytest.mark.slow
def test_a_shard_of_many_files_has_few_of_them_open(tmp_path: Path) -> None:
    script = """
import os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from state_backends.store.io import Priority
from state_backends.store.io_thread import IoThread
from state_backends.store.p_bucket import PBucket
from tests.stores.rig import make_block
io, folder = IoThread(), Path(sys.argv[1])
bucket = PBucket(folder / "files", folder / "live", durable=True)
before = len(os.listdir("/proc/self/fd"))
for n in range(100):
    io.submit(Priority.WRITE, bucket.write([(n, make_block(n, n))])).result()
for n in range(100):
    io.submit(Priority.READ, bucket.fetch(n, [(n, n)])).result()
print(len(os.listdir("/proc/self/fd")) - before)
io.submit(Priority.READ, bucket.drop(0))
io.close()
bucket.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) <= 16
