"""Shared by the endpoints of all APIs: request bodies, their fields, the engine's completions, responses."""
