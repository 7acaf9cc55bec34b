"""One step as plain data: the message to the ranks, the protocol of what computes it, and the times it took."""
