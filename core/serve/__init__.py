"""`hookline serve`: an OpenAI-compatible HTTP server around one engine.

Bare at import. Endpoints ask an `EngineClient`, whether the engine behind it runs in this process or in one of its own.
docs/serving.md explains the command.
"""
