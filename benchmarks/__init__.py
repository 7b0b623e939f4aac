"""Benchmarks: one module each, its docstring is its command, its result is JSON in benchmarks/results."""
