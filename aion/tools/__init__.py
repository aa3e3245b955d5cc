"""What a user runs beside a query: ``inspect``, ``top``, and ``tune``."""
