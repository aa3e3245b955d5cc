"""The settings of Sphinx. ``build.py`` calls it with a folder that has all pages."""

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


def link_pages(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Makes links of the pages that docstrings name."""
    lines[:] = [re.sub(r"(?:``)?\bdocs/([\w-]+/[\w-]+)\.md(?:``)?", r":doc:`/docs/\1`", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", link_pages)
