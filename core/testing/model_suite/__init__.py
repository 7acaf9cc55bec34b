"""The conformance suite of models, the driver of a model without an engine, and ranks that are threads."""

from hookline.core.testing.model_suite.suite import ModelSuite

__all__ = ["ModelSuite"]
