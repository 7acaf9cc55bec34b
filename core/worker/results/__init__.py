"""What a step computed, on its way to the host: tokens, vectors, hidden states."""
