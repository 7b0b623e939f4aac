"""Weights on disk and in memory: one way to open them, one way to write them."""
