"""What every rank of a job runs, and how ranks are started and meet."""
