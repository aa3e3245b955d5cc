"""What users call: each function of the package ``aion`` that needs Spark is in a module of this room.

| | |
| --- | --- |
| in here | ``configure``, ``windowed``, ``group_by``, ``read_files``, ``watermark``, ``table``, ``rescale`` |
| who calls it | users, and :mod:`aion.spark.taking_over` |
| never knows | how state is taken over |
"""
