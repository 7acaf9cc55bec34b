"""The conformance suite of kernels, by what they compute: norms, linears, attention, experts, states, graphs.

Kernels that declare batch-invariant mode are held to that as well.
"""

from hookline.core.testing.kernels_suite.suite import KernelsSuite

__all__ = ["KernelsSuite"]
