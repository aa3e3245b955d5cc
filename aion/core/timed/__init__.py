"""Windows of time: those whose bounds are known without any event, the same for all keys. Pure.

``windows`` decides about all of their definitions at once. ``gone`` remembers which never come back, ``pins`` keeps the
edges of calendars, and ``invariants`` says what must be true.
"""
