"""Finds the bucket layout with the shortest step: calibrated, searched for, and proven by measurement."""
