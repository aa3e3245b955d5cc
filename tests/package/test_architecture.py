"""The architecture as tests: who may import whom, and what the pure core must not touch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aion", "state_backends", "policies", "experiments")

# The top rooms, from the ground up, and the modules beside them. A module imports from its own layer and those above it
# here. Within a layer, rooms and modules have the order that their imports make: they never name each other in a
# circle.
LAYERS = (
    ("policies",),
    ("state_backends",),
    ("aion.errors", "aion.installation", "aion.base"),
    ("aion.aggregates",),
    ("aion.config",),
    ("aion.core",),
    ("aion.execute",),
    ("aion.spec", "aion.local", "aion.metrics", "aion.zones"),
    ("aion.stateful", "aion.state"),
    ("aion.spark",),
    ("aion.sinks",),
    ("aion", "aion.plot"),
    ("aion.demo", "aion.tools"),
    ("aion.cli", "aion.__main__"),
    ("experiments",),
)

DECIDERS = tuple(
    f"aion.core.{room}" for room in ("compaction", "trigger", "lateness", "life", "timed", "keyed", "operator")
)
# Rooms that stay apart although no import in the other direction keeps them from knowing each other.
APART: dict[str, tuple[str, ...]] = {
    "aion.core.ingest": DECIDERS,  # who decides about blocks does not know how they are made, nor the other way round
    **dict.fromkeys(DECIDERS, ("aion.core.ingest",)),
    "aion.core.timed": ("aion.core.keyed", "aion.core.ingest"),
    "aion.core.keyed": ("aion.core.timed", "aion.core.ingest"),
    "aion.core.compaction": (
        "aion.core.slicing",
        "aion.core.query",
        "aion.core.trigger",
        "aion.core.lateness",
        "aion.core.ingest",
    ),
    "aion.core.slicing": ("aion.core.trigger", "aion.core.lateness"),
    "aion.core.query": ("aion.core.trigger", "aion.core.lateness", "aion.core.life", "aion.core.keyed"),
    "aion.spark.daemon": ("aion.spark.startup", "aion.spark.start", "aion.spark.api", "aion.spark.taking_over"),
    "aion.spark.startup": ("aion.spark.daemon", "aion.spark.start", "aion.spark.api", "aion.spark.taking_over"),
    "aion.metrics": ("aion.spec", "aion.local"),
    "aion.plot": ("aion.zones",),
    "aion.demo": ("aion.tools",),
    "aion.tools.inspect": ("aion.tools.tune",),
    "aion.tools.tune": ("aion.tools.inspect",),
}

# Pure by folder. Elsewhere a module that calls itself pure is taken at its word.
PURE_FOLDERS = ("aion.base", "aion.core", "aion.aggregates", "aion.errors", "policies", "state_backends.format")
CONSTANTS = {"state_backends.thresholds"}
"""Reads a variable of the environment when it is imported, so what it says never changes."""

# Everything else has, or may have, an effect: a clock, a thread, a file, a process, a random number, Spark.
HARMLESS = {
    "__future__", "abc", "array", "base64", "bisect", "collections", "collections.abc", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math",
    "numbers", "operator", "re", "contextlib", "datasketches", "difflib", "isal.isal_zlib", "statistics", "struct",
    "typing", "zlib", "html", "numpy", "numpy.typing", "msgspec", "orjson", "pyarrow", "pyarrow.compute", "scipy",
    "scipy.special", "sqlglot", "urllib.parse", "zoneinfo",
}  # fmt: skip

# Effects that hide in harmless modules, and builtins.
EFFECTS = {
    "breakpoint", "eval", "exec", "input", "open", "print", "__import__",
    "io.open", "io.FileIO", "zoneinfo.TZPATH", "zoneinfo.available_timezones", "zoneinfo.reset_tzpath",
    "datetime.now", "datetime.today", "datetime.utcnow", "date.today", "datetime.fromtimestamp",
    "np.random", "np.load", "np.save", "np.savez", "np.fromfile", "np.memmap", "np.loadtxt", "np.savetxt",
    "pa.OSFile", "pa.memory_map", "pa.input_stream", "pa.output_stream", "pa.fs", "pa.flight", "pa.dataset",
    "pa.set_cpu_count", "pa.set_io_thread_count", "pa.set_memory_pool",
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(p): p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}


def belongs(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def says_that_it_is_pure(module: str) -> bool:
    return re.search(r"\bpure\b", ast.get_docstring(TREES[module]) or "", re.IGNORECASE) is not None


PURE = {m for m in FILES if belongs(m, *PURE_FOLDERS) or says_that_it_is_pure(m)}
PURE = {m for m in PURE if not belongs(m, "experiments")}


def layer(module: str) -> int:
    """The number of its layer, by the entry of LAYERS that says the most about the module."""
    places = {name: number for number, names in enumerate(LAYERS) for name in names}
    parts = module.split(".")
    return next(places[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in places)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node: ast.AST, *, at_import_time: bool) -> Iterator[ast.AST]:
    """Every node that can run; with ``at_import_time``, only what runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            rest: list[ast.AST] = list(child.orelse)
        elif at_import_time and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            rest = []
        else:
            rest = [child]
        for found in rest:
            yield found
            yield from statements(found, at_import_time=at_import_time)


@cache
def imports(module: str, *, at_import_time: bool = False) -> set[str]:
    """The modules that a module imports, ours by their full names; what is only for types does not count."""
    found: set[str] = set()
    for node in statements(TREES[module], at_import_time=at_import_time):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{module}: relative imports hide where things come from"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if below in FILES else node.module)
    return found


def ours(modules: set[str]) -> set[str]:
    return {m for m in modules if m in FILES}


def test_pure_modules_import_nothing_with_an_effect() -> None:
    shell = {m: shell for m in PURE if (shell := ours(imports(m)) - PURE - CONSTANTS)}
    assert shell == {}, "the core imports the shell"
    effects = {m: found for m in PURE if (found := imports(m) - set(FILES) - HARMLESS)}
    assert effects == {}


def test_pure_modules_call_nothing_with_an_effect() -> None:
    used = {
        m: {ast.unparse(n) for n in ast.walk(TREES[m]) if isinstance(n, ast.Attribute | ast.Name)} & EFFECTS
        for m in PURE
    }
    assert {m: found for m, found in used.items() if found} == {}


def test_imports_go_in_one_direction() -> None:
    upwards = {m: {i for i in ours(imports(m, at_import_time=True)) if layer(i) > layer(m)} for m in FILES}
    assert {m: found for m, found in upwards.items() if found} == {}
    assert len(LAYERS) <= 15


def test_rooms_that_are_apart_do_not_name_each_other() -> None:
    wrong = {
        (m, other)
        for m in FILES
        for room, others in APART.items()
        if belongs(m, room)
        for other in named(m)
        if belongs(other, *others)
    }
    assert wrong == set()
    rooms = {*APART, *(other for others in APART.values() for other in others)}
    assert {room for room in rooms if not any(belongs(m, room) for m in FILES)} == set(), "no such room"


def test_the_inits_of_packages_of_rooms_are_apart_from_the_rooms() -> None:
    """The store's is above its rooms, and none of the others, such as that of ``aion.core``, imports a room of it."""
    inits = {m for m, path in FILES.items() if path.name == "__init__.py"}
    assert {m for m in FILES if belongs(m, "state_backends") and "state_backends" in imports(m)} == set()
    halls = {init for init in inits if any(belongs(m, init) for m in inits - {init})}
    rooms = {(m, i) for m in halls for i in imports(m, at_import_time=True) if belongs(i, m)}
    assert {m for m, _ in rooms} <= {"state_backends", "aion", "experiments"}


@cache
def named(module: str) -> set[str]:
    """The modules that a module names: in imports, also those for types only, and in texts such as ``"aion.local"``."""
    found: set[str] = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            belows = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {below if below in FILES else str(node.module) for below in belows}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)
    return ours(found)


def folder(module: str) -> str:
    """The folder of a module. A module beside the packages of ``aion`` or ``state_backends`` is one of its own."""
    above = ".".join(FILES[module].relative_to(ROOT).parent.parts)
    return module if above in PACKAGES and above != "policies" else above


def package(module: str) -> str:
    """The package of a module, or its package within ``aion``, ``state_backends`` or ``experiments``."""
    return ".".join(folder(module).split(".")[:2])


def top(module: str) -> str:
    """The package of a module that is imported by one name."""
    return module.partition(".")[0]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_names_itself_in_a_circle() -> None:
    """Neither at import time nor later, and not for types either."""
    assert circle({m: named(m) - {m} for m in FILES}) == []


def between(units: Callable[[str], str]) -> dict[str, set[str]]:
    """Which units name modules of which others."""
    graph: dict[str, set[str]] = {}
    for module in FILES:
        graph.setdefault(units(module), set()).update(units(m) for m in named(module))
    return {unit: others - {unit} for unit, others in graph.items()}


@pytest.mark.parametrize("units", [top, package, folder])
def test_no_package_and_no_folder_names_itself_in_a_circle(units: Callable[[str], str]) -> None:
    assert circle(between(units)) == []


@pytest.mark.parametrize(("package", "others"), [("state_backends", {"policies"}), ("policies", set())])
def test_the_store_and_the_policies_stand_alone(package: str, others: set[str]) -> None:
    """They import nothing of aion, and no text of theirs, such as a docstring or a name to import, names a module."""
    foreign = [name for name in PACKAGES if name not in {package, *others}]
    modules = "|".join(re.escape(m) for m in FILES if m.partition(".")[0] in foreign and "." in m)
    a_module = re.compile(rf"(?<![\w.])(?:{modules})(?![\w])")
    wrong: dict[str, set[str]] = {}
    for module in (m for m in FILES if belongs(m, package)):
        used = {i for i in imports(module) | named(module) if belongs(i, *foreign)}
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= {node.value}.intersection(foreign) or set(a_module.findall(node.value))
        if used:
            wrong[module] = used
    assert wrong == {}


def test_the_store_and_the_policies_can_be_imported_where_aion_cannot() -> None:
    modules = sorted(m for m in FILES if belongs(m, "state_backends", "policies"))
    program = f"import importlib, sys; sys.modules['aion'] = None; [importlib.import_module(m) for m in {modules}]"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_of_the_store_the_core_knows_only_the_format() -> None:
    known = ("state_backends.format", "state_backends.thresholds")
    core = {m for m in FILES if belongs(m, "aion.base", "aion.core", "aion.aggregates", "aion.config")}
    used = {m: {i for i in imports(m) if belongs(i, "state_backends") and not belongs(i, *known)} for m in core}
    assert {m: found for m, found in used.items() if found} == {}


def test_only_what_is_spark_and_the_experiments_import_pyspark() -> None:
    users = {m for m in FILES if any(belongs(i, "pyspark", "py4j") for i in imports(m))}
    assert {m for m in users if not belongs(m, "aion.spark", "aion.stateful", "aion.demo", "experiments")} == set()


def test_nothing_of_aion_but_its_command_line_knows_the_experiments() -> None:
    """It looks them up by the name of their package when they are asked for, and names no module in it."""
    users = {m for m in FILES if any(belongs(i, "experiments") for i in imports(m) | named(m))}
    assert {m for m in users if not belongs(m, "experiments")} == set()
    loads = {m for m, tree in TREES.items() if "import_module('experiments')" in ast.unparse(tree)}
    assert loads == {"aion.cli"}


def test_slow_libraries_are_not_loaded_until_they_are_asked_for() -> None:
    program = (
        "import sys, aion, aion.local, aion.cli, aion.config, state_backends.server.main, state_backends.server.client;"
        "aion.LocalOperator, aion.Tumbling, aion.aggregates;"
        "print({m.split('.')[0] for m in sys.modules} & {'pyspark', 'py4j', 'matplotlib', 'pandas'} or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("none", "")


def test_children_and_the_process_that_only_asks_for_the_roots_state_load_nothing_that_works() -> None:
    """Spark starts the latter with every query, and waits for it."""
    heavy = {
        "aion.spark.tasks.work",
        "aion.spark.api.stream",
        "aion.config",
        "aion.execute.executor",
        "pandas",
        "pydantic",
    }
    modules = "aion.spark.tasks.root, aion.spark.tasks.windows, aion.spark.tasks.child"
    program = f"import sys, {modules}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_parts_of_a_store_hold_each_other() -> None:
    """None inherits from another, and none reaches into the private attributes of another module's objects."""
    for module in (m for m in FILES if belongs(m, "state_backends.store")):
        classes = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.ClassDef)]
        of_each = [{ast.unparse(base).partition("[")[0] for base in node.bases} for node in classes]
        # A protocol that has another one's verbs, too, inherits nothing that runs.
        bases = {base for bases in of_each if "Protocol" not in bases for base in bases}
        assert bases <= {
            "NamedTuple",
            "StrEnum",
            "IntEnum",
            "AssertionError",
            "Generic",
            "Sequence",
            "int",
        }, module
        own = {node.attr for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute) and is_self(node.value)}
        own |= {node.name for node in ast.walk(TREES[module]) if isinstance(node, ast.FunctionDef)}
        others = {
            node.attr
            for node in ast.walk(TREES[module])
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        }
        assert others <= own, module


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_modules_have_at_most_500_lines() -> None:
    lengths = {m: len(path.read_text().splitlines()) for m, path in FILES.items()}
    assert {m: n for m, n in lengths.items() if n > 500} == {}


PICKLES = re.compile(
    r"\b(_?pickle|cloudpickle|dill|joblib|marshal|shelve|copyreg|\w+_pickle|__reduce\w*)\b", re.IGNORECASE
)


SENT = {"aion.spark.api.files"}
"""Spark sends the functions of ``read_files`` to tasks."""


def test_nothing_pickles() -> None:
    """What is stored, or goes to the state server, can be read without being run. Spark sends the user's functions."""
    trees = {module: tree for module, tree in TREES.items() if belongs(module, "aion", "state_backends", "policies")}
    used = {}
    for module, tree in trees.items():
        nodes = list(ast.walk(tree))
        names = [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
        names += [n.name for n in nodes if isinstance(n, ast.alias)]
        names += [n.attr for n in nodes if isinstance(n, ast.Attribute)]
        names += [n.arg for n in nodes if isinstance(n, ast.keyword)]
        used[module] = [name for name in names if name and PICKLES.search(name)]
    assert {module for module, found in used.items() if found} == SENT
    assert PICKLES.search("cloudpickle.dumps") and PICKLES.search("allow_pickle") and len(trees) > 50
