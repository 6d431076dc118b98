"""What is trained: built-in ResNets, the user's own workloads, and where their batches come from."""

from models.workload import Batch, Workload

__all__ = ["Batch", "Workload"]
