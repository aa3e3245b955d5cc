"""Turns events into blocks: ``builder`` makes blocks, ``encoding`` encodes rows, ``levels`` merges small blocks."""
