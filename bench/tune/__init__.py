"""Finds the bucket cap with the shortest step: calibrates, predicts, and proves it by measurement."""
