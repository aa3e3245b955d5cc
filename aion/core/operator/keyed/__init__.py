"""Windows of single keys: sessions, counts, per record, punctuated (Disco's context-aware windows). Pure.

A periodic window is the same for all keys and known without any event. These windows follow from the events of a key.
The operator keeps an index with a few integers for each session or event, and computes the windows from it. ``shapes``
says which windows there are. ``windows`` decides when they are executed, retracted and removed. ``saving`` stores the
index with the blocks of a shard.
"""
