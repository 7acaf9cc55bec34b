"""Steps as CUDA graphs: decodes, steps with prompts, and decodes whose draws are late."""
