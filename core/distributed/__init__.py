"""Tensors between ranks: groups, partitions, collectives, and the heartbeats by which a lost rank is noticed."""
