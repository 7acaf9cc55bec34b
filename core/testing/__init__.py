"""Fakes and the conformance suites that plugin authors subclass in their tests, one per kind."""
