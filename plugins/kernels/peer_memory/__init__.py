"""Memory that ranks share: how rows lie in it, and their sums over ranks."""
