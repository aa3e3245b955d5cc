"""Stream slicing in memory: any windows over one stream, vectorised (Scotty). Pure.

``edges``, ``batch``: from events to slices. ``rows``, ``stores``, ``ranges``: slices, and aggregates over ranges of
them. ``periodic``, ``sessions``, ``counts``, ``per_record``: which windows there are. ``slicer``: all of it together.
"""

from __future__ import annotations

from aion.slicing.folds import MAX, MEAN, MIN, SUM, Fold
from aion.slicing.panes import Kind, Panes
from aion.slicing.slicer import Slicer

__all__ = ["MAX", "MEAN", "MIN", "SUM", "Fold", "Kind", "Panes", "Slicer"]
