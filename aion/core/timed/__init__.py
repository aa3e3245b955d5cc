"""Windows of time: those whose bounds are known without any event, the same for all keys. Pure.

    windows         decides about the windows of all definitions at once
    filled          knows in which windows keys have rows although no event lies there
    purged          remembers which windows never come back
    calendar_state  keeps the edges of calendars when the rules of a zone change

Called by: operator.
Must never know: windows of keys, single rows, and where blocks lie.
"""
