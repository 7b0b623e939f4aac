"""Votes: what the target's per-sample gradients say about each weight."""
