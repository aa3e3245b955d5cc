"""Turns events into blocks: ``builder`` makes blocks, ``block`` is their format, ``levels`` merges small ones."""
