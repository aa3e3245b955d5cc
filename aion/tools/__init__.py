"""What a user runs beside a query: ``explain``, ``inspect``, ``top``, and ``tune``."""
