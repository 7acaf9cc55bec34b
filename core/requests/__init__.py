"""The requests in an engine: their admission, their order and their state until they end."""
