"""The settings of `aion experiment ingest`."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "20 seconds"
WINDOW_MS = 20_000
KEYS = 100
SCHEMA = "key bigint, ts timestamp, value double"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment. ``batches``: by contender; the rest is the same for all."""

    events_per_batch: int
    batches: dict[str, int]
    runs: int
    warm_ups: int
    payload_bytes: int
    slide: str | None
    policy: str
    cores: int
    keys: int = KEYS
    window: str = WINDOW

    @property
    def stem(self) -> str:
        """The file name of the results. It differs for settings whose results cannot be compared."""
        payload = f"-payload{self.payload_bytes}" if self.payload_bytes else ""
        keys = f"-keys{self.keys}" if self.keys != KEYS else ""
        return "ingest" + payload + keys + (f"-slide-{self.slide.replace(' ', '-')}" if self.slide else "")

    @property
    def headline(self) -> str:
        """The settings in one line."""
        size = f" of {self.payload_bytes:,} B" if self.payload_bytes else ""
        sliding = f" by {self.slide}" if self.slide else " tumbling"
        return (
            f"batches of {self.events_per_batch:,} events{size}, {self.keys:,} keys, 5 % late, "
            f"windows of {self.window}{sliding}, {self.cores} cores"
        )
