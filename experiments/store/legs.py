"""Runs one leg of `aion experiment store` in a process: ``python -m experiments.store.legs REQUEST``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.store.settings import Settings

LEGS = {
    "ingest": "experiments.store.ingest:ingest",
    "disk": "experiments.store.disk:disk",
    "late": "experiments.store.windows:late",
    "past": "experiments.store.windows:past",
    "blobs": "experiments.store.blobs:blobs",
}
TIMEOUT_S = 900


def run_leg(leg: str, contender: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Runs a leg in a fresh Python process. Raises RuntimeError with its output if it fails.

    It first syncs all disks, so that the leg does not pay for writes of earlier ones.
    """
    request = {"leg": leg, "contender": contender, "settings": asdict(settings), "folder": str(folder)}
    os.sync()
    command = [sys.executable, "-m", "experiments.store.legs", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{leg} of {contender} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def perform(request: str) -> dict[str, Any]:
    """Runs the requested leg, and returns its figures in bytes and seconds."""
    asked = json.loads(request)
    module, _, name = LEGS[asked["leg"]].partition(":")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in asked["settings"].items()}
    settings = Settings(**values)
    found: dict[str, Any] = getattr(import_module(module), name)(asked["contender"], settings, Path(asked["folder"]))
    return found


if __name__ == "__main__":
    print(json.dumps(perform(sys.argv[1])))
