"""A query: what the user wrote (``spec``), and what follows from it (``plan``). Pure."""
