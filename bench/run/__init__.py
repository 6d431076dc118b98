"""From the command to the summary of one run."""
