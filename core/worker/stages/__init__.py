"""A pipeline stage, a rank with some of the model's layers: it computes micro-batches and sends them to the next."""
