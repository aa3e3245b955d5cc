"""Presets: the policy files that come with Aion, by name, and the schema of them all."""
