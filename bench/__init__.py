"""Measures data-parallel training in PyTorch: single device, DataParallel, DistributedDataParallel."""
