"""What to keep in memory, what to fetch, how large a bucket is: pure policies, and the presets as YAML files.

Nothing here has a clock, a thread or a file (but :mod:`policies.plugins`, which imports a user's class): times and
sizes come in as arguments. Seconds (``_s``) may be of any clock, as long as it is one clock.
"""
