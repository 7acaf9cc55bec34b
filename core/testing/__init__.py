"""Fakes and the conformance suites that plugin authors subclass in their tests, one per kind.

A suite is a module or, where it is large, a package that is named like it and hands on what is for authors; the modules
inside such a package are its parts, and may change.
"""
