"""The start of a rank: the size of its KV cache, the steps that warm it up, and a count of late compilations."""
