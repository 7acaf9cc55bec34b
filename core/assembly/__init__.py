"""Builds a running engine from a validated configuration; the only package that uses all kinds of plugins."""
