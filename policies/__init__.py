"""Pure policies, and the presets as YAML files: what leaves memory, what to fetch and when, how long windows live.

Nothing here uses a clock, a thread or a file. Times and sizes are arguments. Seconds (``_s``) may come from any clock,
but all of them must come from the same one.
"""
