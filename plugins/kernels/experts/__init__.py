"""Experts: routing, and the products of each expert with the tokens that chose it."""
