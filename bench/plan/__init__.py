"""Settings that a user asks for, and the cases that follow from them."""
