"""Checkpoints: finding them, reading their configs and tokenizers, and loading their tensors into parameters."""
