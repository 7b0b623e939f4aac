"""Frozen results of the public surface: what a change of the inside must not change."""
