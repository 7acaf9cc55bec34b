"""From a batch to tokens: the model with its paged attention, step extensions, masks, sampler and scores."""
