"""Names of files and folders that come from elsewhere: from stored state, or from a request. Pure."""

from __future__ import annotations

import re
from typing import Any

PLAIN = "letters, digits, '_', '-' and '.', not beginning with '.'"
"""What a plain name consists of, for messages."""
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")


def is_plain(name: Any) -> bool:
    """Returns whether this is the name of one file or folder. A path, a hidden file and an empty text are not plain
    names.

    Join no other name to a path: ``../name`` would lead out of the folder, and ``/name`` would replace it.
    """
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None
