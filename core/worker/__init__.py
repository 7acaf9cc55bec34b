"""One rank on its device: model, kernels, sampler, request table, graphs."""
