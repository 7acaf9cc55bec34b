"""`hookline quantize SOURCE TARGET quantization=NAME`: writes a quantised checkpoint in a published layout."""
