"""Windows of keys: sessions, counts, per record, punctuated (Disco's context-aware windows). Pure.

They follow from the events of a key. A few integers are kept for each session or event.

    assigners        which windows there are; cut_sessions has the longest of them, and chooses one
    windows          when they run, are retracted and removed
    arriving         which rows are taken, and how they join
    in_memory        the windows of the pages that a batch touches
    page_store       brings pages of the shard's map into memory, and writes them back; pages has their bytes
    closing          from when on a window cannot change
    indexed_windows  which windows an index has, and which of those that ran no longer exist
    orders           facts and orders with many rows; table has their columns
    summary          the windows that end first, for people
    waiting          where rows wait, as the shell provides it

Called by: operator; the shell brings rows and carries out orders.
Must never know: windows of time, and the store behind the map.
"""
