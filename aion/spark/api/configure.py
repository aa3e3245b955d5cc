"""``configure``: makes the Spark settings that Aion needs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from aion.config import (
    SPARK_PREFIX,
    Policy,
    load_policy,
    policy_to_json,
    presets,
    resolve,
    setting_text,
)
from aion.config.layers import Source
from aion.config.model import leaves
from aion.errors import ConfigError, MissingJava
from aion.installation import require_extra
from aion.spark import NEWEST, numbers
from aion.spark.session import undo
from aion.spark.session.quiet import quiet
from aion.spark.session.sessions import is_remote
from aion.spark.session.settings import REQUIRED, of_policy
from aion.spark.start import listener

_OF_HOSTS = (
    "destage.", "io.rate_limit", "memory.moderate", "memory.scarce", "memory.victim",
    "prestage.arguments", "prestage.class",
)  # fmt: skip
"""The keys of the policy that a host has only once. See :class:`state_backends.server.host.Host`."""
log = logging.getLogger(__name__)
JAVA_ADVICE = (
    "Spark needs Java 17 or 21: install it (Debian and Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17) and, if it is not on the PATH, set JAVA_HOME"
)


def configure(
    builder: SparkSession.Builder,
    policy: Source | None = None,
    *,
    stateful: bool = False,
    **overrides: Any,
) -> SparkSession.Builder:
    """Prepares a session builder for :func:`aion.windowed` and :func:`aion.group_by`, and checks the policy and Java.

    For example::

        spark = aion.configure(SparkSession.builder, policy="low_memory").getOrCreate()

    ``stateful=True``: also ``df.groupBy(...).transformWithState*`` of pyspark runs on Aion, in all sessions that are
    built with this option (docs/how-to/stateful.md). :func:`aion.unconfigure` undoes it.

    ``policy``: a preset's name, a path, or a mapping in the shape of the YAML file (default: ``spark.aion.policy``, or
    ``standard`` if that is unset). ``overrides``: single keys, ``memory_budget="1GiB"`` or
    ``memory={"budget": "1GiB"}``.

    Returns a builder with the same methods. Of Spark's own settings, it changes only those without which Aion does not
    work (docs/reference/policies.md). Spark has no public way to read a builder, so
    ``spark.aion.*`` settings in the builder are only checked by :func:`aion.windowed`. Raises PolicyError, MissingJava.
    """
    if not callable(getattr(builder, "config", None)):
        raise TypeError(f"configure: a SparkSession.Builder is needed, e.g. SparkSession.builder, not {builder!r}")
    if not isinstance(stateful, bool):
        raise ConfigError(f"stateful: {stateful!r} is neither True nor False")
    if stateful:
        overrides["stateful"] = {"enabled": True}
    resolve(policy, keyword=overrides, spark_conf={})
    if _connects(builder):
        if stateful:
            raise ConfigError(
                "stateful: on Spark Connect, jobs cannot run on Aion unchanged; leave it out, and write "
                "aion.group_by(df, ...) instead of df.groupBy(...) (docs/how-to/connect.md)"
            )
        require_extra("connect", "configure: a session of Spark Connect")
    else:
        check_java()
    if numbers(pyspark.__version__) > numbers(NEWEST):
        log.warning("pyspark %s is newer than all that Aion was tested with, up to %s", pyspark.__version__, NEWEST)
    if stateful:
        from aion.spark.api import patch

        patch.install()
    own = {**REQUIRED, **_settings(policy, overrides)}
    for key, value in own.items():
        builder.config(key, value)
    log.info(
        "configure: Spark keeps the state of all stateful queries of this session in RocksDB, with a changelog, which "
        "Aion needs; no other setting of Spark changes (docs/reference/policies.md). In a session that is there "
        "already, aion.unconfigure() undoes it"
    )
    return _Builder(builder, own)


class _Builder(SparkSession.Builder):
    """Wraps the user's builder. Notes what a session had before, for :func:`aion.unconfigure`."""

    def __init__(self, builder: SparkSession.Builder, own: Mapping[str, str]) -> None:
        super().__init__()
        self._builder = builder
        self._own = own

    def config(self, *arguments: Any, **named: Any) -> SparkSession.Builder:
        self._builder.config(*arguments, **named)
        return self

    def getOrCreate(self) -> SparkSession:
        live = SparkSession.getActiveSession() or getattr(SparkSession, "_instantiatedSession", None)
        before = _of_hosts(live) if live is not None and listener.watches(live) else {}
        had = {} if live is None else live.conf.getAll
        session = self._builder.getOrCreate()
        if session is live:
            undo.note(session, self._own, had)
        self._prepared(session)
        if before and (kept := [key for key, value in _of_hosts(session).items() if value != before[key]]):
            log.warning(
                "this session has had queries, so %s cannot change until the application ends: its state servers keep "
                "what the first query had (docs/operate/restarts.md). Other settings hold for operators that are made "
                "from now on",
                ", ".join(SPARK_PREFIX + key for key in kept),
            )
        return session

    def create(self) -> SparkSession:
        return self._prepared(self._builder.create())

    def _prepared(self, session: SparkSession) -> SparkSession:
        if not is_remote(session):  # a server has its own log
            quiet(session)
        return session


def _connects(builder: Any) -> bool:
    """Returns whether a builder makes a session of Spark Connect. Its client needs no Java."""
    options: Mapping[str, Any] = getattr(builder, "_options", {})
    mode = str(options.get("spark.api.mode") or os.environ.get("SPARK_API_MODE"))
    if mode.lower() == "connect" or type(builder).__module__.startswith("pyspark.sql.connect."):
        return True
    return bool(options.get("spark.remote") or os.environ.get("SPARK_REMOTE"))


def _of_hosts(session: SparkSession) -> dict[str, Any]:
    """Returns the keys of a session's policy that a host takes from the first query only, with their values."""
    values = policy_to_json(resolve(None, keyword={}, spark_conf=of_policy(session)))
    keys = {f"{section}.{name}": value for section, names in values.items() for name, value in names.items()}
    return {key: value for key, value in keys.items() if key.startswith(_OF_HOSTS)}


def _settings(policy: Source | None, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Returns the policy as Spark settings, so that it reaches :func:`windowed` through the session.

    Only keys that the user gave: a setting that repeats a default would override a policy given later.
    """
    settings: dict[str, str] = {}
    if isinstance(policy, str) and policy in presets():
        settings[f"{SPARK_PREFIX}policy"] = policy
    elif isinstance(policy, str | os.PathLike):
        settings[f"{SPARK_PREFIX}policy"] = str(Path(policy).resolve())
    elif policy is not None:
        settings[f"{SPARK_PREFIX}policy"] = _as_text(policy)
    values = policy_to_json(resolve(policy, keyword=overrides, spark_conf={}))
    for key in sorted(_keys(overrides)):
        section, _, name = key.partition(".")
        settings[SPARK_PREFIX + key] = setting_text(values[section][name])
    return settings


def _as_text(policy: Mapping[str, Any] | Policy) -> str:
    """Returns a mapping as a single setting, which has the precedence of a file: single keys override it."""
    values = policy_to_json(load_policy(policy))
    keys = _keys(values if isinstance(policy, Policy) else policy)
    tree: dict[str, dict[str, Any]] = {}
    for section, _, name in (key.partition(".") for key in sorted(keys)):
        tree.setdefault(section, {})[name] = values[section][name]
    return json.dumps(tree)


def _keys(settings: Mapping[str, Any]) -> set[str]:
    """Returns the dotted keys that a mapping sets. In it, they may be nested, dotted, or with underscores as in
    keywords.
    """
    key_of = {spelling: ".".join(path) for path, _ in leaves() for spelling in (".".join(path), "_".join(path))}
    found: set[str] = set()
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}" for name in value}
        elif key in key_of:
            found.add(key_of[key])
    return found


def check_java() -> int:
    """Returns the major version of the Java that Spark will use. Raises MissingJava, which says what to install."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, but there is no bin/java in it" if home else "there is no java on the PATH"
        raise MissingJava(f"{where}. {JAVA_ADVICE}.")
    result = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', result.stderr + result.stdout)
    if version is None:
        raise MissingJava(f"{java} -version does not print a version. {JAVA_ADVICE}.")
    major = int(version.group(1))
    if major < 17:
        raise MissingJava(f"{java} is Java {major}, which is too old. {JAVA_ADVICE}.")
    return major
