"""From prompts to text: the blocking and the asynchronous front."""
