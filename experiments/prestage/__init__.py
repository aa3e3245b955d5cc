"""What prestaging is worth on Spark: the seconds of on-time, late and final executions, by disk and gap."""

from experiments.prestage.command import prestage

__all__ = ["prestage"]
