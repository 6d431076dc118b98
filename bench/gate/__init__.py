"""Compares a candidate with a baseline."""
