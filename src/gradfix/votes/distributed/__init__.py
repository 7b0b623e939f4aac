"""Votes of several processes, and of models that no device holds."""
