"""The conformance suite of kernels, a module for each kind of operation: norms, linears, attention, experts, states.

Kernels that declare batch-invariant mode are held to that as well.
"""

from hookline.core.testing.kernels_suite.suite import KernelsSuite

__all__ = ["KernelsSuite"]
