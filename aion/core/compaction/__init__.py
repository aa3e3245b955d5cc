"""What is merged when: the ``blocks`` of a slice, and the ``files`` of a shard."""
