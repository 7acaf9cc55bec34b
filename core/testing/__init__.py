"""Fakes and the conformance suites that plugin authors subclass in their tests, one per kind.

A suite is a module or, if it is large, a package of that name, which exports the class for authors; the modules inside
such a package are its parts, and may change.
"""
