"""What a run found, in sentences, and how far to trust it."""
