"""Merges of spectra."""
