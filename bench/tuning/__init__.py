"""Finds the bucket layout with the shortest step: calibrated, searched for, and proven by measurement.

`problem.py` turns a calibration into what a search needs, `candidates.py` chooses what is worth measuring,
`racing.py` what is worth measuring further, all pure; `stages.py` runs the two stages on every rank;
`answer.py` decides, pure, `wording.py` says it.
"""
