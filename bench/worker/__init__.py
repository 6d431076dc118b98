"""One rank of a run: does what the conductor tells it and replies; decides nothing, writes nothing."""
