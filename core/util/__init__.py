"""Small helpers that know nothing of inference."""
