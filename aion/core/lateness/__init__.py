"""How late events are, and how long windows are kept for them (paper section 3.4).

``observe`` counts late events by the end of their window; ``estimate`` and ``models`` say which share comes later than
a given lateness; ``change`` detects when lateness has changed; ``drift`` compares the latest windows with history;
``conformal`` says what bounds have lost; ``bound`` decides with ``policies.cleanup`` how long a new window is kept;
``shared`` is what the shards of one query exchange; ``completeness`` says how complete a row is.
"""
