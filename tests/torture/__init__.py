"""Fault series: mutated files, kills, failing writes. `python -m tests.torture --share 1.0` runs all of it."""
