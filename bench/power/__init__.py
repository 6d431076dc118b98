"""What the gate catches on this machine: A/A and injected slow-down trials with real training steps."""
