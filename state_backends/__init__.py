"""Where the state of a window is. Never imports pyspark."""

import sys

try:  # the modules below use them everywhere, and would fail one by one with a name that says nothing to a user
    import fcntl  # noqa: F401
    import resource  # noqa: F401
except ImportError as error:
    platform = "Windows" if sys.platform == "win32" else sys.platform
    raise ImportError(
        f"Aion does not run on {platform}, which has no file locks and Unix sockets as on Linux (Python's module "
        f"{error.name!r} is missing): use Linux in WSL2 or in a container, or macOS",
        name=error.name,
    ) from None
