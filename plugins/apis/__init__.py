"""The API surfaces that ship with Hookline: OpenAI's endpoints and Anthropic's. Imports none of their code."""

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_apis(register: Registrar) -> None:
    """Add OpenAI's API and Anthropic's."""
    register(
        "openai",
        "hookline.plugins.apis.openai.surface:OpenAI",
        help="chat and text completions, responses, embeddings, scores, tokens: /v1/..., /score, /rerank, /tokenize",
        priority=20,
    )
    register(
        "anthropic",
        "hookline.plugins.apis.anthropic.surface:Anthropic",
        help="messages and the count of their tokens: /v1/messages",
        priority=10,
    )
