"""Windows that each key has its own of: sessions, counts, per record, punctuated (Disco's context-aware windows). Pure.

Where a periodic window is the same for all keys and known without events, these follow from the events of a key. The
operator keeps an index of them, a few integers per session or per event, and works them out from it: ``shapes`` says
what windows there are, ``windows`` when they are executed, retracted and let go, ``saving`` how the index is kept with
the blocks of a shard.
"""
