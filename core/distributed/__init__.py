"""Tensors between ranks: groups, partitions, collectives, signs of life."""
