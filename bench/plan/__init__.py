"""What is asked for, and the cases that follow from it."""
