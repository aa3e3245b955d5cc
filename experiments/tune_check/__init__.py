"""Checks the predictions of `aion tune` against real runs (docs/operate/tuning.md)."""

from experiments.tune_check.command import tune_check

__all__ = ["tune_check"]
