"""Steps over several processes: start, send, watch, end. Knows no configuration and no model."""
