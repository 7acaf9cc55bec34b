"""Finds out without a GPU which kernels a configuration launches, and compiles them before an engine needs them."""
