"""Say whether a machine is fit to measure on."""
