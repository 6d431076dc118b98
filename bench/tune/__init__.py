"""Finds the bucket cap with which DDP trains fastest: a run whose slowest cases leave one after another."""
