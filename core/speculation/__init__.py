"""Speculative decoding: a step has two doors for it, `Decoding` and `Worker.compute_by`; drafters are plugins."""
