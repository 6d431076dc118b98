"""What `bench.predict` reads and writes."""
