"""Lets deeds be done in every process of a run: Python imports this file at its start."""

import os

if "FAULTS_DEEDS" in os.environ:
    import deeds

    deeds.install()
