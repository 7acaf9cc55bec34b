"""Kernels whose results for a row have the same bits in every batch (AttentionSpec.batch_invariant)."""
