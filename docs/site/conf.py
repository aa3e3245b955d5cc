"""The settings of Sphinx. ``build.py`` calls it with a folder that has all pages."""

import inspect
import re
from pathlib import Path
from typing import Any

import aion

project = "Aion"
version = release = aion.__version__
project_copyright = "the authors of Aion"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["introduction.md"]  # the front page includes it
nitpicky = True
# Types in signatures that have no entry: those of other packages, names for unions of types, and what users never name.
nitpick_ignore_regex = [("py:.*", r"(?!aion\.).*"), ("py:class", r"aion\.\w+\.\w+\..*|aion\.spec\.(Keywords|Changes)")]

myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["colon_fence"]
highlight_language = "none"
smartquotes = False
autodoc_member_order = "bysource"
python_display_short_literal_types = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"Aion {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def fields_of_spec() -> tuple[int, int, list[str]]:
    """Returns the lines of the list of fields in the docstring of ``aion.Spec``, and where they begin and end."""
    lines = inspect.cleandoc(aion.Spec.__doc__ or "").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("- "))
    end = lines.index("", begin)
    return begin, end, lines[begin:end]


def complete(_app: Any, _what: str, name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Shows the fields of a ``Spec`` where users look for them, and makes links of the pages that docstrings name."""
    begin, end, fields = fields_of_spec()
    if name == "aion.windowed":
        place = next(number for number, line in enumerate(lines) if line.startswith("The result has"))
        lines[place:place] = [*fields, ""]
    if name == "aion.Spec":
        lines[begin:end] = ["Its fields are the keywords of :func:`aion.windowed`, which has the list of them."]
    lines[:] = [re.sub(r"(?:``)?\bdocs/([\w-]+/[\w-]+)\.md(?:``)?", r":doc:`/docs/\1`", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", complete)
