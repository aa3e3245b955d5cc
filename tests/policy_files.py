"""Policy files, and the errors that reading them raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aion.config import load_policy
from aion.errors import PolicyError

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def refused(source: Any, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source, overrides)
    return str(caught.value)
