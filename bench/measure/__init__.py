"""Measurements of a rank: clocks, timed blocks, the anatomy of a step."""
