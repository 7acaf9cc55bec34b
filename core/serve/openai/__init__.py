"""The endpoints of OpenAI's API, and those of vLLM that its clients use beside them."""
