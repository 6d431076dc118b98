"""What is trained: built-in ResNets, the user's own workloads, and where their batches come from."""
