"""What a machine's noise lets a gate resolve."""
