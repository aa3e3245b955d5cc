"""What several experiments use: runs and their figures, streams, processes, hosts."""
