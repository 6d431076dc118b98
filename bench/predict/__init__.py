"""`bench.predict`: scaling on hardware that is not at hand."""
