"""Nexmark, the field's own benchmark: people, auctions and bids of an auction house (Tucker et al., Apache Beam)."""

from experiments.nexmark.command import nexmark

__all__ = ["nexmark"]
