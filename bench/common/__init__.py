"""Code that all commands share: command line, output, text, errors, processes."""
