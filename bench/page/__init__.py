"""A page as plain data, which knows no run, and what renders it: terminal, HTML, Markdown."""
