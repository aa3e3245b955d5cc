"""What a Spark session, a query's plan and its checkpoint say, and what Aion changes in a session.

| | |
| --- | --- |
| in here | sessions of this process and of Spark Connect, settings, plans, types, checkpoints, how errors show |
| who calls it | all other rooms of :mod:`aion.spark`, and the sinks |
| never knows | tasks, and what starts a query |
"""
