"""Ollama's API: its registration. Imports no endpoint."""

from __future__ import annotations

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_apis(register: Registrar) -> None:
    register("ollama", "hookline_ollama.surface:Ollama", help="Ollama's API: /api/chat, /api/generate, /api/tags")
