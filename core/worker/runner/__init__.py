"""From a batch to tokens: the model with its paged attention, logits processors, masks, sampler and scores."""
