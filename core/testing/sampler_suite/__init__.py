"""The conformance suite of samplers."""

from hookline.core.testing.sampler_suite.suite import LEAST_P_VALUE, SamplerSuite

__all__ = ["LEAST_P_VALUE", "SamplerSuite"]
