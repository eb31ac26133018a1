"""Benchmark cases, contenders, and the measurement of both."""
