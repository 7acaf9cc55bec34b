"""Results of a step on their way to the host: tokens, log-probabilities, pooled vectors, hidden states."""
