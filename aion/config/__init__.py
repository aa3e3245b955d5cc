"""The policy: what is kept where, for how long, and what runs when. Its only side effect is to read files.

``sections``: the keys. ``model``: the policy. ``values`` and ``plugin``: the types of its values. ``layers``: how it is
read, and which source wins. ``reference``: schema, documentation, and policies as commented files. ``explain``: what a
policy means for a window.
"""

from __future__ import annotations

from aion.config.explain import life_of_a_window
from aion.config.layers import (
    SPARK_PREFIX,
    Source,
    load_policy,
    policy_from_json,
    policy_from_text,
    policy_to_text,
    presets,
    resolve,
)
from aion.config.model import (
    KeyPath,
    Policy,
    bucket_limit_bytes,
    budget_bytes,
    policy_to_json,
    setting_text,
)
from aion.config.plugin import Arguments
from aion.config.reference import KeyDoc, describe, differences, json_schema, policy_docs, policy_file
from aion.config.sections import (
    BlocksPolicy,
    DestagingPolicy,
    IoPolicy,
    LatenessPolicy,
    MemoryPolicy,
    PrestagingPolicy,
    StatePolicy,
    TriggerPolicy,
)
from aion.config.values import BoundDuration, Location, Multiple, Shards, Share, Size, format_bytes, size_bytes

__all__ = [
    "SPARK_PREFIX",
    "Arguments",
    "BlocksPolicy",
    "BoundDuration",
    "DestagingPolicy",
    "IoPolicy",
    "KeyDoc",
    "KeyPath",
    "LatenessPolicy",
    "Location",
    "MemoryPolicy",
    "Multiple",
    "Policy",
    "PrestagingPolicy",
    "Shards",
    "Share",
    "Size",
    "Source",
    "StatePolicy",
    "TriggerPolicy",
    "bucket_limit_bytes",
    "budget_bytes",
    "describe",
    "differences",
    "format_bytes",
    "json_schema",
    "life_of_a_window",
    "load_policy",
    "policy_docs",
    "policy_file",
    "policy_from_json",
    "policy_from_text",
    "policy_to_json",
    "policy_to_text",
    "presets",
    "resolve",
    "setting_text",
    "size_bytes",
]
