"""A run's folder: its tables, written, read and summed up."""
