"""What communication costs in a user's own training script, which trains as without it."""

STEPS = 300
"""Steps to watch, unless told otherwise."""
