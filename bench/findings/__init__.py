"""Says what was found in a run, in sentences, and how far to trust it."""
