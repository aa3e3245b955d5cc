"""The errors of a store, and the base of all errors of Aion, which may run where only the store can be imported."""

from __future__ import annotations


class AionError(Exception):
    """The base class of all errors that Aion raises deliberately."""


class ConfigError(AionError, ValueError):
    """A policy, an option or an argument is wrong; raised before any data flows."""


class PolicyError(ConfigError):
    """A policy file or mapping: unknown key, wrong unit, value out of range."""


class StateError(AionError):
    """The base class of errors about stored state and about the server that keeps it."""


class CorruptBlock(StateError):
    """The bytes of a block are not the bytes that were written; the message names the block."""


class CorruptState(StateError):
    """A manifest or a file of a version is damaged or missing; the message names file and version."""


class MissingState(StateError):
    """There is no version of a shard where Aion looks for them; the message names the folder and the setting."""


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
