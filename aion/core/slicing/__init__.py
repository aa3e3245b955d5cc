"""Which slice an event belongs to, which slices a window is made of, and how slices are combined (Scotty). Pure.

    edges     where slices begin and end
    grid      the slices and segments of all definitions of a plan
    aligned   the windows of time that cover given slices
    tree      slices combined in advance, so that windows read fewer
    sessions  sessions from the events of a key; event_windows: the other windows of keys

Called by: ingest, query, and those who decide about windows.
Must never know: lateness, triggers, and what is kept.
"""
