"""Any causal decoder of the library transformers over core's paged KV cache: `model` has the plugin."""
