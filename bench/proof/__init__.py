"""Proofs that a case trains as the plain module does."""
