"""The operations between products and attention: norms, gates, rotations, cache writes, each one pass over memory."""
