"""``aion inspect``: shows, verifies and repairs a state folder."""
