"""Decides what happens to windows: facts come in, orders go out. Pure.

``operator`` drives definitions: windows of time (:mod:`aion.core.timed`) and of keys (:mod:`aion.core.keyed`).
``overview`` predicts from a snapshot what will happen.
"""
