"""What tasks of all kinds ask: where the state server of their host is."""

from __future__ import annotations

from aion.config import Policy
from state_backends.server.client import StateClient, daemon_pid, executor_pid

# A worker serves many tasks, one at a time. They share a client for each application and timeout.
_clients: dict[tuple[str, float], StateClient] = {}


def client_of(application: str, policy: Policy) -> StateClient:
    """This worker's connection to the state server of its host."""
    timeout_s = policy.io.request_timeout_us / 1e6
    client = _clients.get((application, timeout_s))
    if client is None:
        client = StateClient.connect(
            application, watch_pid=executor_pid(), daemon_pid=daemon_pid(), timeout_s=timeout_s
        )
        _clients[application, timeout_s] = client
    return client
