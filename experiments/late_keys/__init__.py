"""The cost of one late event in windows of few and of many keys, and the size of a window that many batches feed."""

from experiments.late_keys.command import late_keys

__all__ = ["late_keys"]
