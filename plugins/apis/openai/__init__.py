"""OpenAI's API, with the endpoints of vLLM's server that its clients use beside it."""
