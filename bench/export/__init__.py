"""`bench.export`: a run for other tools, or to hand on."""
