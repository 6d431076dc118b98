"""Draws the figures of the page with matplotlib."""
