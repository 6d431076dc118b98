"""Workloads that are trained: built-in ResNets, the user's own, and where their batches come from."""
