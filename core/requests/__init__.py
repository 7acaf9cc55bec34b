"""The requests an engine holds: their life, their order, and what lets them in."""
