"""Aion on Spark: the only package that imports pyspark.

This module loads no other, so that workers load only the modules that they need. It checks the version of pyspark,
because pip does not see that of a platform which brings its own (docs/operate/deploy.md).
"""

from __future__ import annotations

import re

from aion.errors import ConfigError
from aion.installation import require_extra

SOURCES_FROM = (4, 2)
"""From this version on, a source in Python may say what it reads in a batch."""
OLDEST, NEWEST = "4.1", "4.3"
"""The versions of pyspark that Aion was tested with. A test compares them with pyproject.toml."""

require_extra("spark", "Aion on Spark")
import pyspark  # noqa: E402


def numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version. A vendor may add more, such as ``4.1.0-amzn-0``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


if numbers(pyspark.__version__) < numbers(OLDEST):
    raise ConfigError(
        f"pyspark {pyspark.__version__} ({pyspark.__file__}) is too old: Aion needs Spark {OLDEST} to {NEWEST}. "
        "Use a cluster or a release of your platform that has one of them"
    )
