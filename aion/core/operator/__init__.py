"""Decides what happens to windows: facts come in, orders go out.

``operator`` decides about the windows that all keys share. ``keyed`` decides about the windows of single keys.
"""
