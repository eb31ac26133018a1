"""Benchmark: cases, contenders (tritoncp and baselines), checks and timing."""
