"""Estimates with intervals: of values, of the cases of one run, and between two separate runs."""
