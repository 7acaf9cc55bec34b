"""What lies between products and attention: norms, gates, rotations and cache writes, each one pass over memory."""
