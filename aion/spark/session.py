"""Every Spark setting that Aion needs, and none that it does not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from aion.config import SPARK_PREFIX, Policy, describe, policy_to_json, presets, resolve, setting_text
from aion.errors import MissingJava

# What Aion needs of Spark. The README explains each in a line.
REQUIRED = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
}
# Better than Spark's defaults for what Aion does; the user's own values win.
PREFERRED = {
    "spark.sql.session.timeZone": "UTC",
}
_ROWS, _BYTES = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT = 2**31 - 1
# As Spark has it where nobody says anything, and had it before there was a limit in bytes.
_MOST_ROWS = 10_000
JAVA_ADVICE = (
    "Spark needs Java 17 or 21: install it (Debian and Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17) and, if it is not on the PATH, set JAVA_HOME"
)


def configure(
    builder: SparkSession.Builder,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    **overrides: Any,
) -> SparkSession.Builder:
    """Prepares a session builder for :func:`aion.windowed`, and checks the policy and Java.

    ``policy``: a preset's name, a path, or a mapping of the YAML's shape (default: ``spark.aion.policy``, or
    else ``standard``). ``overrides``: single keys, ``memory_budget="1GiB"`` or ``memory={"budget": "1GiB"}``.
    Raises PolicyError, MissingJava.
    """
    given: dict[str, str] = {k: str(v) for k, v in builder._options.items()}
    resolve(policy, keyword=overrides, spark_conf=given)
    check_java()
    # The driver starts a Python of its own to look at the stateful operator: it must be this one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", os.environ["PYSPARK_PYTHON"])
    for key, value in REQUIRED.items():
        builder = builder.config(key, value)
    for key, value in {**PREFERRED, **_batches(given)}.items():
        if key not in given:
            builder = builder.config(key, value)
    for key, value in _settings(policy, overrides, given).items():
        builder = builder.config(key, value)
    return builder


def _batches(given: Mapping[str, str]) -> dict[str, str]:
    """How large batches for Python become: bounded by rows, and by bytes only where the user lets rows be many.

    With a limit in bytes Spark adds up the sizes of all columns after each row, which is most of what a row costs.
    """
    rows = given.get(_ROWS, "4096")
    few = rows.isdecimal() and 0 < int(rows) <= _MOST_ROWS
    return {_ROWS: rows, _BYTES: str(_NO_LIMIT)} if few else {}


def _settings(
    policy: str | Path | Mapping[str, Any] | Policy | None,
    overrides: Mapping[str, Any],
    given: Mapping[str, str],
) -> dict[str, str]:
    """The policy as Spark settings, so that it reaches :func:`windowed` through the session.

    Only what was asked for: a setting that merely repeats a default would outrank a policy given later.
    """
    values = policy_to_json(resolve(policy, keyword=overrides, spark_conf=given))
    asked = _keys(overrides)
    settings: dict[str, str] = {}
    if isinstance(policy, str) and policy in presets():
        settings[f"{SPARK_PREFIX}policy"] = policy
    elif isinstance(policy, str | Path):
        settings[f"{SPARK_PREFIX}policy"] = str(Path(policy).resolve())
    elif policy is not None:
        # A mapping stands for a YAML file, which Spark's settings outrank.
        source = policy_to_json(policy) if isinstance(policy, Policy) else policy
        asked |= {key for key in _keys(source) if SPARK_PREFIX + key not in given}
    for key in sorted(asked):
        section, _, name = key.partition(".")
        settings[SPARK_PREFIX + key] = setting_text(values[section][name])
    return settings


def _keys(settings: Mapping[str, Any]) -> set[str]:
    """The dotted keys that a mapping sets: nested, dotted, or with underscores as in keywords."""
    spelled = {spelling: doc.key for doc in describe() for spelling in (doc.key, doc.key.replace(".", "_"))}
    found: set[str] = set()
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}" for name in value}
        elif key in spelled:
            found.add(spelled[key])
    return found


def check_java() -> int:
    """The major version of the Java that Spark will use; raises MissingJava with what to install."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, and has no bin/java" if home else "there is no java on the PATH"
        raise MissingJava(f"{where}. {JAVA_ADVICE}.")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    if version is None:
        raise MissingJava(f"{java} -version does not tell a version. {JAVA_ADVICE}.")
    major = int(version.group(1))
    if major < 17:
        raise MissingJava(f"{java} is Java {major}, which is too old. {JAVA_ADVICE}.")
    return major
