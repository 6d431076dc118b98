"""The conditions of a run: hosts, GPUs, load, launcher, code, and the manifest that records them."""
