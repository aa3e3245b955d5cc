"""Decides what happens to windows: facts come in, orders go out. Pure.

``operator`` decides about the windows that all keys share, and drives those of single keys (:mod:`aion.core.keyed`).
"""
