"""What the documents show is what the code says."""

from __future__ import annotations

from pathlib import Path

from state_backends.ledger import diagram

DOCS = Path(__file__).parent.parent / "docs"


def test_the_diagram_of_places_is_the_ledgers_own() -> None:
    assert f"```mermaid\n{diagram()}\n```" in (DOCS / "store.md").read_text()
