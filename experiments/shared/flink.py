"""Flink, which no part of Aion depends on: its jars, and programs in Java that experiments run on it.

Whoever wants a comparison downloads the jars from PyPI and passes their path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETUP = Path(__file__).with_name("FlinkSetup.java")
LIBRARY = re.compile(r"pyflink/lib/.*\.jar")
# What Flink's own start script opens to its serialisers on Java 17.
OPENED = ("java.base/java.util", "java.base/java.lang", "java.base/java.time")
BACKENDS = {"flink-heap": "hashmap", "flink-rocksdb": "rocksdb"}
"""Flink's names for the state backends of contenders."""
CHECKPOINT_MS = 2_000
_HEAP = "6g"
HOW_TO_GET = (
    "Flink is not measured. For its jars (330 MB): pip download --no-deps -d out apache-flink-libraries==2.3.0, "
    "then --flink out/apache_flink_libraries-2.3.0-py2.py3-none-any.whl"
)


class FlinkError(RuntimeError):
    """Flink's jars or a Java compiler are missing, or a run failed. The message has the end of what it printed."""


def check(jars: Path) -> None:
    """Raises FlinkError if there are no jars, or no compiler."""
    if not jars.exists():
        raise FlinkError(f"there is no {jars}. {HOW_TO_GET}")
    if shutil.which("javac") is None:
        raise FlinkError(
            "there is no javac; Flink's program is compiled with a JDK, for example openjdk-17-jdk-headless"
        )


def class_path(program: Path, jars: Path, work: Path) -> str:
    """Returns Flink's libraries and the program's classes, for Java. Raises FlinkError.

    ``jars``: a folder with the libraries, or the wheel that has them. They are unpacked, and the program is compiled,
    once in ``work``.
    """
    check(jars)
    work.mkdir(parents=True, exist_ok=True)
    found = sorted(str(jar.absolute()) for jar in _unpacked(jars, work).rglob("*.jar"))
    if not any("flink-dist" in jar for jar in found):
        raise FlinkError(f"no flink-dist jar in {jars}. {HOW_TO_GET}")
    libraries = os.pathsep.join(found)
    sources = (program, SETUP)
    read = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.sha256(read + libraries.encode()).hexdigest()[:10]
    classes = work / f"flink-classes-{digest}"
    if not classes.exists():
        with tempfile.TemporaryDirectory(dir=work) as unfinished:
            printed(["javac", "-nowarn", "-cp", libraries, "-d", unfinished, *map(str, sources)])
            shutil.copytree(unfinished, classes)
    return f"{libraries}{os.pathsep}{classes.absolute()}"


def _unpacked(jars: Path, work: Path) -> Path:
    """The folder of the jars. A wheel is unpacked once."""
    if jars.is_dir():
        return jars
    if not zipfile.is_zipfile(jars):
        raise FlinkError(f"{jars} is neither a folder nor a wheel. {HOW_TO_GET}")
    folder = work / jars.stem
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=work) as unfinished, zipfile.ZipFile(jars) as wheel:
            wheel.extractall(unfinished, [name for name in wheel.namelist() if LIBRARY.fullmatch(name)])
            shutil.copytree(unfinished, folder)
    return folder


def found_by(program: Path, class_path: str, arguments: Sequence[object]) -> dict[str, Any]:
    """Runs a program. Returns what its line of JSON says. Raises FlinkError if it fails."""
    opened = (f"--add-opens={name}=ALL-UNNAMED" for name in OPENED)
    command = ["java", f"-Xmx{_HEAP}", *opened, "-cp", class_path, program.stem, *map(str, arguments)]
    found: dict[str, Any] = json.loads(next(line for line in printed(command).splitlines() if line.startswith("{")))
    return found


def printed(command: list[str]) -> str:
    """What a command printed. Raises FlinkError with its last lines if it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise FlinkError(f"{command[0]} ended with {done.returncode}:\n{last}")
    return done.stdout
