"""Carries out what the operator orders: reads blocks, computes windows, and makes rows of panes.

    tenant        the protocol of what keeps state in a shard; windows is one
    assembly      makes the objects that a policy describes
    executor      the orders of one shard; contents: what is in blocks; keyed: orders for windows of keys
    applying      functions of events; combining: partials of slices; keyed_panes: of windows of keys
    filling       rows of keys for windows without events
    rows          the rows of a result; changing and updates: which of them are shown again
    spilling      rows that do not fit into memory; grouping and held_rows: those that do
    file_reading  events from files; file_formats, file_places and skipped_files belong to it
    trace         what came, without payload; recorder writes it
    evolving      definitions that change between two starts

Called by: aion.local, aion.spark, aion.stateful (the protocol), aion.tools.
Must never know: Spark, and which process it is in.
"""
