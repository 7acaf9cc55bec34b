"""Which kernels a configuration launches, found out without a GPU, and their compilation before anybody needs them."""
