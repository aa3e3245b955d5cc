"""Windows of keys: sessions, counts, per record, punctuated (Disco's context-aware windows). Pure.

A periodic window is the same for all keys and known without any event. These windows follow from the events of a key.
The operator keeps a few integers for each session or event, and computes the windows from them. ``shapes`` says which
windows there are. ``windows`` decides when they are executed, retracted and removed, for those that are ``in_memory``.
``kept`` brings pages of the shard's map into memory, and writes them back; ``pages`` has their bytes.
"""
