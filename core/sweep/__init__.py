"""Sweeps over configurations: one job for each, in a process of its own."""
