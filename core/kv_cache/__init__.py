"""The blocks of the KV cache: their holders, the prefix cache, and the budget of blocks for a plan."""
