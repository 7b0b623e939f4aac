"""Engines: ways to get every sample's gradient signs."""
