"""Checks for a machine with a GPU: python -m tools.card --help."""
