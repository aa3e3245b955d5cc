"""Brings the state of stateful processors from Spark's own store to Aion's, and back.

| | |
| --- | --- |
| in here | ``migrate``, and ``read_state`` with ``restoring`` |
| who calls it | users |
| never knows | nothing in :mod:`aion.spark` is hidden from it, and nothing imports it |
"""
