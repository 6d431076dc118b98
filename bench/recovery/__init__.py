"""Faults and what is left of them: the journal, restarts, resuming."""
