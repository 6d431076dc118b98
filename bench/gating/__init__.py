"""A candidate held against a baseline."""
