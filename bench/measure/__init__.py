"""What is measured on a rank: clocks, timed blocks, the anatomy of a step."""
