"""The Python API, from prompts to text: the blocking LLM and the asynchronous AsyncLLM."""
