"""Network traffic: Disco's figures 5 and 6 on Spark. Compares Aion's merging levels with forwarding every event."""

from experiments.network.command import network

__all__ = ["network"]
