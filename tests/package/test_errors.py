"""The errors that users catch: their names, what they are kinds of, and how they survive the way between processes."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from aion import errors
from state_backends.format import errors as of_the_store
from state_backends.server import wire

ROOT = Path(__file__).parents[2]
KINDS: dict[str, tuple[type[BaseException], ...]] = {
    "AionError": (Exception,),
    "ApplyError": (errors.AionError,),
    "AttemptSuperseded": (errors.StateError,),
    "BadFile": (errors.AionError,),
    "ConfigError": (errors.AionError, ValueError),
    "CorruptBlock": (errors.StateError,),
    "CorruptState": (errors.StateError,),
    "DiskError": (errors.StateError, OSError),
    "ForeignState": (errors.StateError,),
    "FormatError": (errors.StateError,),
    "IntegerOverflow": (errors.AionError, ArithmeticError),
    "MissingExtra": (errors.ConfigError, ImportError),
    "MissingJava": (errors.ConfigError,),
    "MissingState": (errors.StateError,),
    "OutOfMemory": (errors.ServerError,),
    "PolicyError": (errors.ConfigError,),
    "RequestError": (errors.ServerError,),
    "SchemaError": (errors.ConfigError,),
    "ServerError": (errors.StateError,),
    "ServerUnreachable": (errors.ServerError,),
    "ShadowedPackage": (errors.AionError, ImportError),
    "SinkError": (errors.AionError,),
    "StateError": (errors.AionError,),
    "StorageError": (errors.StateError, OSError),
    "TooLarge": (errors.AionError,),
    "TransformError": (errors.AionError,),
    "WatermarkError": (errors.ConfigError,),
    "WindowError": (errors.ConfigError,),
}


def classes(module: object) -> dict[str, type[Exception]]:
    return {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Exception)}


def test_every_error_is_exported_under_its_name_and_is_of_its_kind() -> None:
    assert {name: c.__bases__ for name, c in classes(errors).items()} == KINDS
    assert KINDS.keys() <= set(errors.__all__)


def test_there_is_one_class_of_each() -> None:
    exported = classes(errors)
    assert {name: c for name, c in classes(of_the_store).items() if exported[name] is not c} == {}


@pytest.mark.parametrize("name", KINDS)
def test_it_can_be_pickled_and_old_pickles_of_it_can_be_read(name: str) -> None:
    kind = getattr(errors, name)
    for data in (pickle.dumps(kind("why")), b"caion.errors\n" + name.encode() + b"\n(Vwhy\ntR."):
        error = pickle.loads(data)
        assert (type(error), str(error)) == (kind, "why")


@pytest.mark.parametrize("name", classes(of_the_store))
def test_the_state_server_sends_it_by_its_name(name: str) -> None:
    kind = getattr(errors, name)
    with pytest.raises(kind, match="why") as caught:
        wire.raise_error(wire.encode_error(kind("why")))
    assert type(caught.value) is kind
    assert caught.value.__suppress_context__  # else its text would be shown twice: first as the server sent it


@pytest.mark.slow
def test_an_error_that_repeats_another_ones_text_does_not_have_it_as_its_cause() -> None:
    """A traceback would show the text twice."""
    twice = []
    for path in (path for package in ("aion", "state_backends") for path in (ROOT / package).rglob("*.py")):
        for handler in ast.walk(ast.parse(path.read_text())):
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
                continue
            if not {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} & KINDS.keys():
                continue
            for node in ast.walk(handler):
                if isinstance(node, ast.Raise) and node.exc is not None and isinstance(node.cause, ast.Name):
                    named = {n.id for n in ast.walk(node.exc) if isinstance(n, ast.Name)}
                    if node.cause.id == handler.name and handler.name in named:
                        twice.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert twice == []
