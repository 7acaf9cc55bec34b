"""Recurrent layers: short convolutions and the gated delta rule, token by token and in chunks."""
