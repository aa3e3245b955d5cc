"""Builds the documentation site: ``python docs/site/build.py [FOLDER]``, by default into ``out/site``.

The pages are the Markdown files of the repository, and pages that are made from the code: the names of the package,
the keys of a policy, the commands. All are laid out in ``FOLDER-source``, and Sphinx builds them from there. A link
to a file that is not a page leads to a page that shows the file, because the site has no repository beside it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
KINDS = ("start", "how-to", "operate", "reference", "inside", "measured")
PAGES = ("*.md", *(f"docs/{kind}/*.md" for kind in KINDS), "examples/*.md")
PICTURES = ("docs/pictures/*", "docs/measured/*.png")
NAMED = re.compile(r"(?<!\[)`(docs/[\w-]+/[\w-]+\.md)`")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
THEME = '%%{init: {"theme": "neutral", "themeVariables": {"fontFamily": "arial"}, "fontFamily": "arial"}}%%\n'
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
MODULES = ("aggregates", "sinks", "errors", "metrics", "plot", "state")
"""The public modules of the package."""
GROUPS = {
    "A query on Spark": ("configure", "windowed", "panes", "dropped", "Spec"),
    "Windows": ("Tumbling", "Sliding", "Cumulative", "Calendar", "Session", "Count", "PerRecord", "Punctuated"),
    "A function of all events of a window": ("Apply", "Window"),
    "Events from elsewhere": ("read_files", "watermark"),
    "Look at a query and its results": ("explain", "table", "changes", "progress"),
    "A join of two streams": ("join",),
    "Stateful processors": ("group_by", "migrate", "restoring"),
    "Looking into state": ("read_state",),
    "Without Spark, and the way back": ("LocalOperator", "unconfigure"),
}
"""The names of the package in the order in which users meet them."""
SHARED = "(df, spec=None, /, **fields)"
"""The signature that the reference shows for a function that takes the fields of a ``Spec``."""
WITH_FIELDS = {("aion", "windowed"), ("aion", "explain")}
ARGUMENTS = {"column": '"speed"', "ord": '"ts"', "k": "3", "percentage": "0.9"}
"""What examples of aggregates are called with."""
OWN_POLICIES = """\
A class of yours can decide what moves to disk, or when it is read ahead (:doc:`/docs/reference/policies`). This is
what it gets and returns.

"""
RETURNED = ("aion.core.timing.When", "aion.spark.api.group_by.Grouped", "aion.spark.taking_over.migrate.Migrated")
"""Classes that users get or give, and do not import."""


# -- pages that people wrote --------------------------------------------------------------------------


def written() -> Iterator[Path]:
    """Yields the Markdown files, relative to the repository."""
    for pattern in PAGES:
        yield from (path.relative_to(ROOT) for path in sorted(ROOT.glob(pattern)))


def title_of(page: Path) -> str:
    """Returns the first heading of a page."""
    return (ROOT / page).read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def shown(path: Path) -> Path:
    """Returns the page that shows a file or folder of the repository."""
    return Path("files", *path.parts[:-1], path.name + ".md")


class Layout:
    """The folder with all sources of the site."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages = set(written())
        self._pictures = {path.relative_to(ROOT) for pattern in PICTURES for path in ROOT.glob(pattern)}
        self._shown: set[Path] = set()

    def write(self, name: str | Path, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def page(self, path: Path, text: str) -> None:
        """Writes a page. Its links to files lead to the pages that show them; Mermaid becomes a picture.

        A page that is named becomes a link with the page's title.
        """
        text = NAMED.sub(lambda named: self._titled(path, Path(named[1]), named[0]), self._drawn(path, text))
        self.write(path, LINK.sub(lambda link: self._target(path, link[1]), text))

    def _titled(self, page: Path, named: Path, as_written: str) -> str:
        if named not in self._pages:
            return as_written
        return f"[{title_of(named)}]({os.path.relpath(named, page.parent)})"

    def _target(self, page: Path, link: str) -> str:
        target = Path(os.path.normpath(page.parent / link))
        if target in self._pages or target in self._pictures or not (ROOT / target).exists():
            return link  # Sphinx complains of what does not exist
        self._show(target)
        return os.path.relpath(shown(target), page.parent)

    def _drawn(self, page: Path, text: str) -> str:
        """Without Mermaid: browsers would have to fetch the program that draws it."""

        def draw(block: re.Match[str]) -> str:
            picture = Path("pictures", f"{page.stem}-{text.count('```', 0, block.start())}.svg")
            svg = import_module("mmdr").render(THEME + block[1]).svg()
            self.write(picture, svg)
            width = re.findall(r'viewBox="\S+ \S+ ([\d.]+)', svg)[0]
            # With a width, Sphinx links the whole picture, of which a narrow page shows a small one.
            lines = [f":::{{image}} {os.path.relpath(picture, page.parent)}", f":width: {float(width):.0f}px"]
            lines += [":alt: " + " ".join(block[1].split()), ":class: diagram", ":::"]
            # As many lines as before, so that Sphinx names the line of the page.
            return "\n".join([*lines, *[""] * (block[0].count("\n") + 1 - len(lines))])

        return FENCE.sub(draw, text)

    def _show(self, path: Path) -> None:
        """Makes the page that shows a file, or the files of a folder."""
        if path in self._shown:
            return
        self._shown.add(path)
        if (ROOT / path).is_dir():
            inside = sorted(file.relative_to(ROOT) for file in (ROOT / path).iterdir() if file.is_file())
            lines = [f"- [{file.name}]({os.path.relpath(file, shown(path).parent)})" for file in inside]
            # The links are relative to where the page lies in the repository.
            text = "\n".join(lines)
            self.write(shown(path), f"# `{path}`\n\n" + LINK.sub(lambda link: self._inside(path, link[1]), text) + "\n")
            return
        content = (ROOT / path).read_text(encoding="utf-8")
        self.write(shown(path), f"# `{path}`\n\n``````{LANGUAGES.get(path.suffix, '')}\n{content}``````\n")

    def _inside(self, folder: Path, link: str) -> str:
        target = Path(os.path.normpath(shown(folder).parent / link))
        self._show(target)
        return os.path.relpath(shown(target), shown(folder).parent)

    def list_of_files(self) -> None:
        """Makes the page of all files that pages show."""
        names = "\n".join(str(shown(path).relative_to("files").with_suffix("")) for path in sorted(self._shown))
        text = f"# Files\n\nFiles of the repository that pages name.\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"
        self.write("files/index.md", text)


def introduction() -> str:
    """Returns what the README says first, with how to install Aion and a first query: all above its second heading."""
    return (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ", 1)[0].split("\n", 1)[1].strip() + "\n"


def web_address(remote: str) -> str | None:
    """Returns where a browser finds a repository that git fetches from here. None if it is not on the web."""
    found = re.fullmatch(r"(?:https://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    return found and f"https://{found[1]}/{found[2]}"


def front_page() -> str:
    """Returns the front page. Its navigation ends with the repository, if this is a clone of one on the web."""
    text = (HERE / "index.md").read_text(encoding="utf-8")
    asked = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        remote = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # no git: the folder is not a clone
        return text
    address = web_address(remote)
    return text if address is None else text.replace("files/index\n", f"files/index\nRepository <{address}>\n")


def notebook() -> str:
    """Returns the example that is a notebook, as a page: below each cell is what it shows."""
    parts = []
    for cell in json.loads((ROOT / "examples/notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text", ()) or output.get("data", {}).get("text/plain", ()))
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


# -- pages from the code ------------------------------------------------------------------------------


def title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n\n"


def entry(module: str, name: str, value: Any) -> str:
    """Returns the directive that shows a name with its signature and its docstring.

    Of a class that users only make, it shows no members: others call them.
    """
    if inspect.isclass(value):
        only_made = module == "aion" and name in {*GROUPS["Windows"], "Spec", "Apply"}
        return f".. autoclass:: {module}.{name}\n" + ("" if only_made else "   :members:\n") + "\n"
    if not callable(value):
        return f".. autodata:: {module}.{name}\n\n"
    return f".. autofunction:: {module}.{name}{SHARED if (module, name) in WITH_FIELDS else ''}\n\n"


def names_of(module: Any) -> list[str]:
    """Returns the public names: those in ``__all__``, or without it, those that the module defines."""
    defined = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
    return sorted(getattr(module, "__all__", None) or (name for name in defined if name[0] != "_"))


def package() -> str:
    """Returns the page of the package ``aion``."""
    aion = import_module("aion")
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(set(aion.__all__) - set(MODULES)):
        raise ValueError(f"GROUPS and aion.__all__ differ by {set(grouped) ^ (set(aion.__all__) - set(MODULES))}")
    text = title("aion") + ".. module:: aion\n\n" + f"{aion.__doc__}\n\n"
    first, last = MODULES[:-1], MODULES[-1]
    text += f"Its modules are {', '.join(f':mod:`aion.{name}`' for name in first)} and :mod:`aion.{last}`.\n\n"
    for group, names in GROUPS.items():
        text += title(group, "-") + "".join(entry("aion", name, getattr(aion, name)) for name in names)
    text += title("What some of them take and return", "-")
    return text + "".join(entry(*name.rpartition(".")[::2], find(name)) for name in RETURNED)


def find(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def module(name: str) -> str:
    """Returns the page of a public module."""
    found = import_module(name)
    text = title(name) + f".. automodule:: {name}\n\n"
    return text + "".join(entry(name, public, getattr(found, public)) for public in names_of(found))


def aggregates() -> str:
    """Returns the page of the aggregates: a table of all, then each, then how they are computed."""
    name = "aion.aggregates"
    found = import_module(name)
    text = title(name) + f".. currentmodule:: {name}\n\nAfter ``from aion import aggregates as A``:\n\n"
    text += ".. list-table::\n   :header-rows: 1\n\n   * - call\n     - result\n"
    rest = ""
    for public in found.__all__:
        value = getattr(found, public)
        if public != value.__name__:
            rest += (
                f".. function:: {public}{inspect.signature(value)}\n\n   Another name of :func:`{value.__name__}`.\n\n"
            )
            continue
        rest += entry(name, public, value)
        if inspect.isfunction(value) and value is not found.aggregate:
            also = [f":func:`{o}`" for o in found.__all__ if getattr(found, o) is value and o != public]
            said = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            said += f" Also called {' and '.join(also)}." if also else ""
            text += f"   * - ``{example_of(value)}``\n     - {said}\n"
    text += "   * - :func:`aggregate`\n     - What three functions of yours compute.\n\n"
    return text + title("Each of them", "-") + rest + title("How they are computed", "-") + f".. automodule:: {name}\n"


def example_of(aggregate: Any) -> str:
    """Returns a call of an aggregate."""
    needed = [p.name for p in inspect.signature(aggregate).parameters.values() if p.default is p.empty]
    given = [ARGUMENTS[name] for name in needed if name in ARGUMENTS]
    return f"A.{aggregate.__name__}({', '.join(given)})"


def own_policies() -> str:
    """Returns the page of what classes that decide about memory get and return."""
    text = title("Classes for your own policies") + OWN_POLICIES
    for name in ("policies.destage", "policies.prestage"):
        text += title(name, "-") + f".. automodule:: {name}\n\n"
        found = import_module(name)
        text += "".join(entry(name, public, getattr(found, public)) for public in names_of(found))
    return text


def policy() -> str:
    """Returns the page of all keys of a policy. Texts below keys name pages, which become links with their titles."""
    from aion.config import policy_docs

    def link(found: re.Match[str]) -> str:
        return f"[{title_of(Path(found[1]))}](../{found[1]})"

    return re.sub(r"`?\b(docs/[\w-]+/[\w-]+\.md)`?", link, policy_docs())


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields a command and all below it, with their names."""
    yield name, command
    for word, below in sorted(getattr(command, "commands", {}).items()):
        yield from commands(below, f"{name} {word}")


def command_page(head: str, found: list[tuple[str, Any]]) -> str:
    """Returns a page of commands, from their help."""
    lines = [f"# {head}", ""]
    for name, command in found:
        context = command.context_class(command, info_name=name)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        lines += [f"## {name}", "", plain(command.help or ""), "", "```console", usage, "```", ""]
        lines += [f":::{{program}} {name}", ":::", ""]
        for parameter in command.get_params(context):
            written, said = parameter.get_help_record(context) or ("", "")
            if written and not written.startswith("--help"):
                lines += [f":::{{option}} {written}", "", plain(said), ":::", ""]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Returns text of a help as Markdown that shows it as it is."""
    return re.sub(r"([<*\[\]])", r"\\\1", inspect.cleandoc(text))


# -- all of it ----------------------------------------------------------------------------------------


def lay_out(folder: Path) -> None:
    """Writes all sources of the site into an empty folder."""
    from typer.main import get_command

    from aion.cli import app

    layout = Layout(folder)
    for path in written():
        layout.page(path, (ROOT / path).read_text(encoding="utf-8"))
    for pattern in PICTURES:
        for path in ROOT.glob(pattern):
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.relative_to(ROOT))
    layout.page(Path("introduction.md"), introduction())
    layout.page(Path("examples/notebook.md"), notebook())
    layout.write("index.md", front_page())
    layout.write("reference/aion.rst", package())
    layout.write("reference/aggregates.rst", aggregates())
    for name in MODULES[1:]:
        layout.write(f"reference/{name}.rst", module(f"aion.{name}"))
    layout.write("reference/policies.rst", own_policies())
    layout.page(Path("reference/policy.md"), policy())
    all_commands = list(commands(get_command(app), "aion"))
    experiments = [each for each in all_commands if each[0].startswith("aion experiment")]
    tools = [each for each in all_commands if each not in experiments]
    layout.write("reference/command-line.md", command_page("Command line", tools))
    layout.write("reference/experiments.md", command_page("Experiments", experiments))
    layout.list_of_files()


def main(arguments: list[str]) -> int:
    """Builds the site. Returns the exit code of Sphinx, which takes every warning as an error."""
    sys.path.insert(0, str(ROOT))
    from sphinx.cmd.build import build_main

    folder = Path(arguments[0]) if arguments else ROOT / "out/site"
    source = folder.with_name(f"{folder.name}-source")
    for old in (folder, source):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir(parents=True)
    lay_out(source)
    words = ["-q", "-W", "--keep-going", "-E", "-c", str(HERE), "-d", str(source / ".doctrees")]
    return int(build_main([*words, str(source), str(folder)]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
