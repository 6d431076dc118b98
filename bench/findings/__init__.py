"""What may be said of a run, in sentences, and how far to trust it."""
