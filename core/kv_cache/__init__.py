"""The blocks of the KV cache: which request holds them, which can be found again, and how many a plan may take."""
