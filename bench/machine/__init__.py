"""What a run is measured on: hosts, GPUs, load, launcher, code, and the manifest that says so."""
