"""Who holds which block of the KV cache, what can be found again, and what a plan may still take."""
