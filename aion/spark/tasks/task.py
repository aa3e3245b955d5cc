"""What tasks of all kinds ask: where the state server of their host is."""

from __future__ import annotations

from aion.config import Policy
from state_backends.server.client import StateClient, daemon_pid, executor_pid

# A worker serves many tasks, one at a time. They share a client for each application, timeout, and limit of memory.
_clients: dict[tuple[str, float, int], StateClient] = {}


def client_of(application: str, policy: Policy) -> StateClient:
    """This worker's connection to the state server of its host.

    What it keeps to send again follows the policy's limit for the memory of a worker.
    """
    timeout_s, limit_bytes = policy.io.request_timeout_us / 1e6, policy.apply.memory_bytes
    client = _clients.get((application, timeout_s, limit_bytes))
    if client is None:
        client = StateClient.connect(
            application,
            watch_pid=executor_pid(),
            daemon_pid=daemon_pid(),
            timeout_s=timeout_s,
            replay_bytes=limit_bytes,
        )
        _clients[application, timeout_s, limit_bytes] = client
    return client
