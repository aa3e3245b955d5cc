"""What the bytes of stored state are: blocks, checksums, names of files, and the errors of a store. Pure."""
