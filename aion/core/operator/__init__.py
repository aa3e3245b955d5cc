"""The life of windows: facts in, orders out.

``operator`` decides about windows that all keys share, ``keyed`` about windows of single keys.
"""
