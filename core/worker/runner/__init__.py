"""From a batch to tokens: the model with its paged attention, step extensions, late rows, sampler and scores."""
