"""The code blocks and commands of the documents, and what it takes to run them somewhere else than they say."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KINDS = ("start", "how-to", "operate", "reference", "inside", "measured")
"""The folders of the pages. What is in another folder of ``docs`` is no page."""
IN_DOCS = [f"docs/{kind}/{path.name}" for kind in KINDS for path in sorted((ROOT / "docs" / kind).glob("*.md"))]
PAGES = ["README.md", "CONTRIBUTING.md", *IN_DOCS]
RECIPES = [
    f"docs/how-to/{place}"
    for place in ("recipes.md", "bad-data.md#bad-clocks", "bad-data.md#duplicates", "runs-that-end.md")
]
"""Pages and sections with programs of their own."""
SHELLS = {"console", "sh", "shell", "bash"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([\w-]*)(.*)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
REST = "_the_rest_of_the_arguments"
SAID = "_what_expressions_gave"


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line``: the first one inside; ``section``: the anchor of the heading of level 2 above it."""

    page: str
    line: int
    language: str
    text: str
    section: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


@dataclass(frozen=True)
class Command:
    """A command of a shell, its words without comments; ``in_prose``: between backticks, not in a block."""

    page: str
    line: int
    words: tuple[str, ...]
    in_prose: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def anchor(heading: str) -> str:
    """What leads to a heading in a link."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def parse(page: str, text: str) -> tuple[list[Block], str]:
    """The fenced blocks of a page, and the page with nothing in their places. Raises ValueError for an open fence."""
    blocks: list[Block] = []
    prose: list[str] = []
    fence, start, language, section = "", 0, "", ""
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.fullmatch(line)
        if not fence and re.match(r"\s*(`{3,}|~{3,})", line):
            if found is None or found[3].strip():
                raise ValueError(f"{page}:{number}: a fence that is indented, or says more than its language")
            fence, start, language, inside = found[1], number + 1, found[2], []
            prose.append("")
        elif fence and line.strip() == fence:
            blocks.append(Block(page, start, language, "\n".join(inside) + "\n", section))
            fence = ""
            prose.append("")
        else:
            inside.append(line)
            prose.append("" if fence else line)
            if not fence and line.startswith("## "):
                section = anchor(line[3:])
    if fence:
        raise ValueError(f"{page}:{start}: the block has no end")
    return blocks, "\n".join(prose)


@cache
def read(page: str) -> tuple[list[Block], str]:
    return parse(page, (ROOT / page).read_text())


def blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in read(page)[0] if not languages or block.language in languages]


def blocks_of(page: str, language: str) -> list[Block]:
    return [block for block in read(page)[0] if block.language == language]


def is_in(block: Block, place: str) -> bool:
    """``place``: a page, or a section of it, as in a link."""
    return place in (block.page, f"{block.page}#{block.section}")


def commands(programs: tuple[str, ...]) -> list[Command]:
    """Every command in a block of a shell; of these programs also those in running text, between backticks."""
    return [command for page in PAGES for command in _commands(page, programs)]


def _commands(page: str, programs: tuple[str, ...]) -> Iterator[Command]:
    found, prose = read(page)
    for block in found:
        if block.language not in SHELLS:
            continue
        held, first = "", 0
        for number, line in enumerate(block.text.splitlines(), block.line):
            first = first if held else number
            if line.endswith("\\"):
                held += line[:-1]
                continue
            if words := shlex.split(held + line, comments=True):
                yield Command(page, first, tuple(words))
            held = ""
        assert not held, f"{block} ends with a backslash"
    for span in _SPAN.finditer(prose):
        if span[1].split()[:1] != [span[1].strip()] and span[1].split()[0] in programs:
            line = prose.count("\n", 0, span.start()) + 1
            yield Command(page, line, tuple(shlex.split(span[1])), in_prose=True)


def spark_settings(command: Command) -> dict[str, str]:
    """What a ``spark-submit`` sets."""
    return dict(value.split("=", 1) for option, value in pairwise(command.words) if option == "--conf")


class _Elsewhere(ast.NodeTransformer):
    """Relative folders (``"cp/"``) and those below ``/var/tmp`` are in ``folder``. An ellipsis among the arguments of a
    call stands for those that are not written; what an expression gives is kept, so that somebody can close it."""

    def __init__(self, folder: Path, rest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._rest = rest

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", node.value):
                return ast.copy_location(ast.Constant(str(self._folder / node.value)), node)
            if node.value.startswith("/var/tmp/"):
                return ast.copy_location(ast.Constant(str(self._folder / Path(node.value).name)), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg is not None and _is_ellipsis(keyword.value):
                keyword.value = _of_rest(keyword.arg)
        if any(map(_is_ellipsis, node.args)):
            node.args = [arg for arg in node.args if not _is_ellipsis(arg)]
            given = {keyword.arg for keyword in node.keywords}
            node.keywords += [ast.keyword(name, _of_rest(name)) for name in self._rest if name not in given]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        append = ast.Attribute(ast.Name(SAID, ast.Load()), "append", ast.Load())
        return ast.Expr(ast.Call(append, [node.value], []))


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _of_rest(name: str) -> ast.expr:
    return ast.Subscript(ast.Name(REST, ast.Load()), ast.Constant(name), ast.Load())


def run_python(place: str, given: Mapping[str, Any], folder: Path, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the Python blocks of a page or section, one after the other, in one namespace, which is returned.

    ``given``: names that the page takes for granted. Whatever a statement that is only an expression gave is in the
    list ``SAID`` of the namespace. An error names the page and the line.
    """
    names: dict[str, Any] = {"__name__": "__main__", REST: rest, SAID: [], **given}
    page = place.partition("#")[0]
    for block in read(page)[0]:
        if block.language == "python" and is_in(block, place):
            tree = ast.parse("\n" * (block.line - 1) + block.text, str(ROOT / page))
            tree = ast.fix_missing_locations(_Elsewhere(folder, rest).visit(tree))
            exec(compile(tree, str(ROOT / page), "exec"), names)
    return names
