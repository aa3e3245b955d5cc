"""An I/O thread that dies, by an exception between two of its steps: nobody waits for it, or loses anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backends.backends import StoreConfig
from tests.server.conftest import Connect, block, open_shard, server_of, snapshot, values, wait_until

PLUGIN = '''
import ctypes, pathlib, threading
class Destage:
    """Ends the I/O thread of the server that it runs in, once."""
    def __init__(self, done): self.done = pathlib.Path(done)
    def suggest(self, view):
        if not self.done.exists():
            self.done.write_text("once")
            (io,) = [thread for thread in threading.enumerate() if thread.name == "aion-io"]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(io.ident), ctypes.py_object(SystemExit))
        return []
'''


@pytest.mark.slow
def test_a_server_whose_io_thread_died_is_replaced_and_the_task_goes_on(
    application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    done = tmp_path / "done"
    store = StoreConfig(
        budget_bytes=1 << 20, bucket_limit_bytes=1 << 19, destage_class="mine:Destage", destage={"done": str(done)}
    )
    client = connect()
    first = server_of(application)
    attempt = open_shard(client, tmp_path / "state", None, "t1", store=store)
    attempt.append([(0, False, block(1, 2, 3))])
    wait_until(done.exists)
    attempt.commit(snapshot(1))
    assert server_of(application) != first
    assert attempt.servers == 2
    attempt = open_shard(client, tmp_path / "state", "t1", "t2", store=store)
    assert values(attempt, 0) == [1, 2, 3]
