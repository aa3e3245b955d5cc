"""``aion inspect``: what a state folder holds."""
