"""What the endpoints of all APIs share: bodies, fields, the engine's completions of a request, answers."""
