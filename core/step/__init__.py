"""One step as plain data: the message to the ranks, the executor's protocol, and the times it took."""
