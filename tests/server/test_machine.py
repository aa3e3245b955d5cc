"""How much memory there is and how much is in use, on made-up trees of control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from state_backends.server.machine import memory_limit_bytes, memory_share_used

MIB = 1 << 20
MACHINE = 1 << 40
NONE_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=MACHINE, percent=37.5))


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, MACHINE),
        ({"proc/self/cgroup": "garbage\n\n::\n0"}, MACHINE),
        # v2 in a container: its own group is the root of what it sees
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 512 * MIB}, 512 * MIB),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max"}, MACHINE),
        ({f"{V2}/memory.max": 512 * MIB}, 512 * MIB),
        # v2 on a host: nested, the tightest counts, wherever it is
        (
            {
                "proc/self/cgroup": "0::/user.slice/app.scope",
                f"{V2}/user.slice/memory.max": 300 * MIB,
                f"{V2}/user.slice/app.scope/memory.max": 900 * MIB,
            },
            300 * MIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/user.slice/app.scope",
                f"{V2}/user.slice/memory.max": "max",
                f"{V2}/user.slice/app.scope/memory.max": 200 * MIB,
                f"{V2}/other.slice/memory.max": MIB,
            },
            200 * MIB,
        ),
        # v2 whose path leads out of the namespace
        ({"proc/self/cgroup": "0::/../../other", f"{V2}/memory.max": 64 * MIB}, 64 * MIB),
        # v1, nested, and without a limit
        (
            {
                "proc/self/cgroup": "4:memory:/yarn/container_1\n3:cpu,cpuacct:/x\n0::/",
                f"{V1}/memory.limit_in_bytes": NONE_V1,
                f"{V1}/yarn/memory.limit_in_bytes": NONE_V1,
                f"{V1}/yarn/container_1/memory.limit_in_bytes": 2048 * MIB,
            },
            2048 * MIB,
        ),
        ({"proc/self/cgroup": "4:memory:/", f"{V1}/memory.limit_in_bytes": NONE_V1}, MACHINE),
        # v1 in a container that sees the host's path, but only its own group is mounted
        ({"proc/self/cgroup": "4:hugetlb,memory:/docker/abc", f"{V1}/memory.limit_in_bytes": 700 * MIB}, 700 * MIB),
        # hybrid: v2 is mounted beside v1
        (
            {
                "proc/self/cgroup": "4:memory:/a\n0::/b",
                f"{V1}/a/memory.limit_in_bytes": 900 * MIB,
                f"{V2}/unified/b/memory.max": 800 * MIB,
            },
            800 * MIB,
        ),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "not a number"}, MACHINE),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 0}, MACHINE),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 4 * MACHINE}, MACHINE),
    ],
)
def test_the_smallest_limit_wins(tmp_path: Path, files: dict[str, str | int], limit: int) -> None:
    assert memory_limit_bytes(tree(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({}, 0.375),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max", f"{V2}/memory.current": 5}, 0.375),
        (
            {
                "proc/self/cgroup": "0::/",
                f"{V2}/memory.max": 1000,
                f"{V2}/memory.current": 700,
                f"{V2}/memory.stat": "anon 400\nfile 300\ninactive_file 200\nactive_file 100",
            },
            0.5,
        ),
        # the fullest group counts, not the one with the smallest limit
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/memory.max": 10_000,
                f"{V2}/a/memory.current": 9_000,
                f"{V2}/a/b/memory.max": 1_000,
                f"{V2}/a/b/memory.current": 300,
            },
            0.9,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a",
                f"{V1}/memory.limit_in_bytes": NONE_V1,
                f"{V1}/memory.usage_in_bytes": NONE_V1,
                f"{V1}/a/memory.limit_in_bytes": 1000,
                f"{V1}/a/memory.usage_in_bytes": 650,
                f"{V1}/a/memory.stat": "inactive_file 650\ntotal_inactive_file 50",
            },
            0.6,
        ),
        # used beyond the limit, for a moment; and numbers that were read one after the other
        ({f"{V2}/memory.max": 1000, f"{V2}/memory.current": 1200}, 1.0),
        (
            {f"{V2}/memory.max": 1000, f"{V2}/memory.current": 100, f"{V2}/memory.stat": "inactive_file 150"},
            0.0,
        ),
        ({f"{V2}/memory.max": 1000, f"{V2}/memory.current": 100, f"{V2}/memory.stat": "broken"}, 0.1),
        ({f"{V2}/memory.max": 1000}, 0.375),
    ],
)
def test_the_share_in_use(tmp_path: Path, files: dict[str, str | int], share: float) -> None:
    assert memory_share_used(tree(tmp_path, files)) == pytest.approx(share)


def test_what_is_no_text_counts_as_not_there(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"\xff\xfe")
    assert memory_limit_bytes(tmp_path) == MACHINE


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0 < memory_limit_bytes() <= psutil.virtual_memory().total
    assert 0 < memory_share_used() <= 1
