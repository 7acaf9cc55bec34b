"""One step as plain data: the message to the ranks, who computes it, what it took."""
