"""Looking into state without Spark: live windows, open sessions and the open rows of joins, as Arrow."""

from aion.state.reading import read

__all__ = ["read"]
