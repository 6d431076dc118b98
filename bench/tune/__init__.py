"""Starts `bench.tune`, which is a run with a preset: see `bench/run/tune.py`."""
