"""OpenAI's files and batches: a store in a local folder, and batches that are answered by the engine that serves."""
