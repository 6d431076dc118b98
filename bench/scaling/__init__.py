"""The simulated step: what training would take elsewhere, fed by a calibration."""
