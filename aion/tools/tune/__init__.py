"""Chooses a policy: replays a recorded trace, and finds out what each would cost (docs/operate/tuning.md).

disk.py        a disk with a simulated clock
files.py       files without bytes, for the real store to stand on
sizes.py       blocks without rows, for the real executor to work on
simulator.py   one replay, under one policy
search.py      the policies that are tried
calibrate.py   how fast this machine is
command.py     what ``aion tune`` prints and writes
"""
