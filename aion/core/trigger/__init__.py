"""When a late window is computed again (paper section 3.4). Pure.

    triggers      the kinds: every batch, interval, count
    staleness     the one that bounds how stale a window becomes
    planner       the best instants for a number of executions
    distribution  how late events are, as the planner sees it

Called by: life and timed, keyed beside it; lateness uses the distribution.
Must never know: windows, blocks, and the watermark.
"""
