"""Benchmarks: every figure is a ratio of arms that alternate in one process."""
