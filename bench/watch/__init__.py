"""The cost of communication in a user's own training script, which trains as without the watch."""

STEPS = 300
"""Steps to watch, unless told otherwise."""
