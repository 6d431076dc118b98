"""Makes the page people review: one self-contained HTML file from one or more runs."""
