"""The site of the documentation (``make docs``) has every page, name, key and command, and its links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer

import aion
from aion.cli import app
from aion.config import describe

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "docs" / "site" / "build.py"
MISSING = [name for name in ("sphinx", "myst_parser", "furo", "mmdr", "sphinx_copybutton") if find_spec(name) is None]


@cache
def build(name: str = "build") -> Any:
    """The program that builds the site, or the settings of Sphinx."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_site", BUILD.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def names_of_commands(command: Any, name: str) -> Iterator[str]:
    yield name
    for word, below in getattr(command, "commands", {}).items():
        yield from names_of_commands(below, f"{name} {word}")


# -- what Sphinx gets ---------------------------------------------------------------------------------


def test_the_navigation_has_each_page_once() -> None:
    entries = re.findall(r"```\{toctree\}\n(.*?)```", (BUILD.parent / "index.md").read_text(), re.DOTALL)
    lines = [line for entry in entries for line in entry.splitlines() if line and not line.startswith(":")]
    pages = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    assert all(len(entry.split("\n\n")[-1].splitlines()) <= 12 for entry in entries), "a group that nobody reads"
    written = {str(path.with_suffix("")) for path in build().written()}
    assert len(pages) == len(set(pages))
    assert written - set(pages) == set()
    captions = re.findall(r":caption: (.*)", "\n".join(entries))
    how_to = [caption for caption in captions if caption.startswith("How to ")]
    code = "Names, keys and commands"
    assert len(how_to) == 4
    assert captions == ["Start", *how_to, "Operate", "Reference", code, "Inside", "Measured", "Project"]


def test_the_front_page_shows_how_to_install_aion_and_a_first_query() -> None:
    readme = (ROOT / "README.md").read_text()
    first = build().introduction()
    assert first.strip() in readme and "## " not in first
    assert "pip install" in first and "aion.windowed(" in first and "|on_time|" in first
    front = build().front_page()
    assert front.index("introduction.md") < front.index("## ")
    shown = re.sub(
        r"```\{toctree\}\n.*?```", lambda found: "" if ":hidden:" in found[0] else found[0], front, flags=re.DOTALL
    )
    assert len(re.findall(r"^- ", shown, re.MULTILINE)) <= 6 and "{toctree}" not in shown


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/them/aion.git", "https://example.org/them/aion"),
        ("https://user:secret@example.org/them/aion", "https://example.org/them/aion"),
        ("git@example.org:them/aion.git", "https://example.org/them/aion"),
        ("ssh://git@example.org/them/aion", "https://example.org/them/aion"),
        ("/somewhere/aion", None),
        ("", None),
    ],
)
def test_the_repository_is_linked_where_it_is_on_the_web(remote: str, address: str | None) -> None:
    assert build().web_address(remote) == address


def test_pages_that_a_text_names_become_links_with_their_titles(tmp_path: Path) -> None:
    build().Layout(tmp_path).page(Path("CHANGELOG.md"), "See `docs/how-to/sinks.md` and `docs/page.md`.\n")
    assert (tmp_path / "CHANGELOG.md").read_text() == "See [Sinks](docs/how-to/sinks.md) and `docs/page.md`.\n"


def test_a_search_finds_how_to_do_something_before_what_was_measured() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: nothing else runs the program of the search")
    found = [["docs/measured/results", 30], ["CHANGELOG", 20], ["docs/inside/store", 15], ["docs/how-to/watermark", 5]]
    program = (
        (BUILD.parent / "scorer.js").read_text()
        + f"const found = {json.dumps(found)}"
        + ".map(([page, score]) => [page, Scorer.score([page, '', '', null, score])]);"
        + "console.log(JSON.stringify(found.sort((one, other) => other[1] - one[1]).map(([page]) => page)))"
    )
    done = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
    order = ["docs/how-to/watermark", "docs/inside/store", "docs/measured/results", "CHANGELOG"]
    assert json.loads(done.stdout) == order


def test_the_page_of_the_notebook_has_what_its_cells_show() -> None:
    cell, shown = build().notebook().split("assert minutes()", 1)[1].split("```text\n")
    assert cell.endswith("minutes()\n```\n\n")
    assert [line.split()[-1] for line in shown.partition("\n```")[0].splitlines()] == ["n", "3", "1", "1", "1"]


# -- the reference of the calls -----------------------------------------------------------------------


def test_the_reference_begins_with_what_users_call_first() -> None:
    entries = re.findall(r"^\.\. auto\w+:: aion\.(\w+)", build().package(), re.MULTILINE)
    assert entries[:3] == ["configure", "windowed", "panes"] and entries.index("Spec") < entries.index("Tumbling")
    assert set(entries) >= set(aion.__all__) - set(build().MODULES)
    assert "aion." not in re.findall(r"autofunction:: aion\.windowed(.*)", build().package())[0]


def described(name: str, value: Any) -> list[str]:
    """The lines of an entry."""
    lines = (inspect.getdoc(value) or "").splitlines()
    build("conf").complete(None, "", name, value, None, lines)
    return lines


def test_the_fields_of_a_spec_are_told_once_and_shown_with_windowed() -> None:
    names = [field.name for field in fields(aion.Spec)]
    windowed = "\n".join(line for line in described("aion.windowed", aion.windowed) if line.startswith("- "))
    assert {name for name in names if f"``{name}``" in windowed} == set(names)
    assert not [line for line in described("aion.Spec", aion.Spec) if line.startswith("- ")]
    assert any(":func:`aion.windowed`, which has the list" in line for line in described("aion.Spec", aion.Spec))


def functions() -> list[tuple[str, Any]]:
    """The public functions, without the aggregates, which a table shows."""
    found = [(f"aion.{name}", getattr(aion, name)) for name in aion.__all__]
    found += [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module in (aion.sinks, aion.metrics, aion.plot)
        for name in module.__all__
    ]
    found.append(("aion.aggregates.aggregate", aion.aggregates.aggregate))
    return [(name, value) for name, value in found if inspect.isfunction(value)]


@pytest.mark.parametrize(("name", "value"), functions(), ids=[name for name, _ in functions()])
def test_each_function_has_an_example(name: str, value: Any) -> None:
    found = re.findall(r"For example::\n\n((?: {4}.*\n?|\n)+)", inspect.getdoc(value) or "")
    assert len(found) == 1, name
    tree = ast.parse(textwrap.dedent(found[0]))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called & {name, name.replace("aion.aggregates", "A")}


def test_one_table_has_all_aggregates_with_calls_that_work() -> None:
    text = build().aggregates()
    calls = re.findall(r"\* - ``(A\..*?)``", text)
    made = [eval(call, {"A": aion.aggregates}) for call in calls]
    assert all(isinstance(each, aion.aggregates.Aggregate) for each in made)
    also = re.findall(r":func:`(\w+)`", " ".join(re.findall(r"Also called (.*)\.$", text, re.MULTILINE)))
    shown = {each.function for each in made} | {call[2:].partition("(")[0] for call in calls} | set(also)
    assert set(aion.aggregates.__all__) - shown == {"Aggregate", "aggregate"}
    assert text.index("list-table") < text.index("autofunction") < text.index("automodule")


def test_blocks_of_mermaid_become_pictures_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    if find_spec("mmdr") is None:
        pytest.skip("mmdr is not installed: pip install -e '.[docs]'")
    text = "a\n\n```mermaid\nstateDiagram-v2\n    [*] --> active\n    active --> [*]\n```\n\nb\n"
    build().Layout(tmp_path).page(Path("docs/page.md"), text)
    made = (tmp_path / "docs/page.md").read_text()
    assert "mermaid" not in made and made.splitlines().index("b") == text.splitlines().index("b")
    (picture,) = re.findall(r"\{image\} (\S+)", made)
    assert "active" in (tmp_path / "docs" / picture).read_text()


def test_pictures_of_pages_are_taken_as_pictures(tmp_path: Path) -> None:
    layout = build().Layout(tmp_path)
    shown = {page: re.findall(r"!\[[^]]*\]\((?!http)(.*?)\)", (ROOT / page).read_text()) for page in build().written()}
    assert any(path.endswith(".png") for paths in shown.values() for path in paths)
    for page, paths in shown.items():
        for path in paths:
            layout.page(page, f"![a picture]({path})\n")
            assert (tmp_path / page).read_text() == f"![a picture]({path})\n"


def test_links_to_what_is_no_page_lead_to_a_page_that_shows_it(tmp_path: Path) -> None:
    layout = build().Layout(tmp_path)
    layout.page(
        Path("docs/how-to/page.md"),
        "[a](sinks.md#dropped-rows) [b](../../deploy/job.py) [c](../../deploy) [d](https://x.org)\n",
    )
    links = re.findall(r"\]\((.*?)\)", (tmp_path / "docs/how-to/page.md").read_text())
    assert links == ["sinks.md#dropped-rows", "../../files/deploy/job.py.md", "../../files/deploy.md", "https://x.org"]
    assert (ROOT / "deploy/job.py").read_text() in (tmp_path / "files/deploy/job.py.md").read_text()
    inside = re.findall(r"\]\((.*?)\)", (tmp_path / "files/deploy.md").read_text())
    assert {path.name for path in (ROOT / "deploy").iterdir() if path.is_file()} == {Path(link).stem for link in inside}
    assert all((tmp_path / "files" / link).is_file() for link in inside)


# -- what a browser gets ------------------------------------------------------------------------------


class Page(HTMLParser):
    """The links and anchors of a page; ``prose``: its text without blocks of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.prose = ""
        self._hidden = 0
        self.text = path.read_text()
        self.feed(self.text)

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.prose += data

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("pre", "script", "style")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("pre", "script", "style")
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of a site that was built from nothing, by path."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run([sys.executable, str(BUILD), str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


def page(site: dict[Path, Page], name: str) -> Page:
    (found,) = (page for path, page in site.items() if path.as_posix().endswith(f"/site/{name}.html"))
    return found


@pytest.mark.proof
def test_code_can_be_copied(site: dict[Path, Page]) -> None:
    assert "copybutton.js" in page(site, "index").text


@pytest.mark.proof
def test_each_public_name_has_an_entry(site: dict[Path, Page]) -> None:
    anchors = page(site, "reference/aion").anchors
    for name in aion.__all__:
        if name in build().MODULES:
            module = getattr(aion, name)
            public = set(build().names_of(module))
            entries = page(site, f"reference/{name}").anchors
            assert public and {f"aion.{name}.{each}" for each in public} <= entries
        else:
            assert f"aion.{name}" in anchors


@pytest.mark.proof
def test_each_key_of_a_policy_and_each_command_has_an_entry(site: dict[Path, Page]) -> None:
    keys = page(site, "reference/policy")
    for doc in describe():
        assert doc.key.replace(".", "-").replace("_", "-") in keys.anchors, doc.key
    names = set(names_of_commands(typer.main.get_command(app), "aion"))
    anchors = page(site, "reference/command-line").anchors | page(site, "reference/experiments").anchors
    assert {"aion tune", "aion policy check", "aion experiment windows"} <= names
    assert {name.replace(" ", "-") for name in names} <= anchors


@pytest.mark.proof
def test_no_link_and_no_picture_is_broken(site: dict[Path, Page]) -> None:
    broken = []
    for path, found in site.items():
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                assert parts.scheme in ("https", "http", ""), link
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in site and anchor not in site[target].anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


@pytest.mark.proof
def test_nothing_is_fetched_from_elsewhere_and_no_markup_is_left(site: dict[Path, Page]) -> None:
    for path, found in site.items():
        assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"https?:", found.text), path
        assert 'class="problematic"' not in found.text and "language-mermaid" not in found.text, path
        assert not re.search(r"\]\(|:\w+:`|``|^#+ ", found.prose, re.MULTILINE), path
