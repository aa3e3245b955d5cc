"""What is done with checkpoints that are there: taken over from stock Spark, set back, copied, read.

| | |
| --- | --- |
| in here | ``migrate``, ``rewind``, ``fork``, and ``read_state`` with ``restoring`` |
| who calls it | users |
| never knows | nothing in :mod:`aion.spark` is hidden from it, and nothing imports it |
"""
