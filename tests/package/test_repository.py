"""What lies in the repository: text that people wrote."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 300 << 10


def test_no_large_file_was_committed() -> None:
    """A wheel, a data set or a binary that slipped in stays in every clone for good."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no git here, or no repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in paths if path.is_file()}
    assert sizes and {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}
