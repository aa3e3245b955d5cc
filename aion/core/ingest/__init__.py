"""Events to blocks: ``builder`` makes them, ``block`` is their format, ``levels`` merges them on their way."""
