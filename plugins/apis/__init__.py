"""The API surfaces that ship with Hookline: OpenAI's endpoints and Anthropic's. Imports none of their code."""

from dataclasses import dataclass

from hookline.core.contracts import Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class BatchesConfig:
    """Where files and batches are kept, and how much of them."""

    folder: str = "batches"
    """Folder of the store, which is made if it is not there."""
    max_bytes: int = bounded(10 * 2**30, 2**20)
    """Most bytes of all files; further uploads are refused, and a batch whose answers take half of it fails."""
    max_file_bytes: int = bounded(100 * 2**20, 1024)
    """Largest file that may be uploaded."""
    keep_s: int = bounded(30 * 86_400, 1)
    """Seconds until files and ended batches are deleted, unless the client asks for less."""
    max_rows: int = bounded(64, 1)
    """Rows of a batch in progress at once; one batch is answered at a time in each front end."""


@hookimpl
def register_apis(register: Registrar) -> None:
    """Add OpenAI's API, Anthropic's, and OpenAI's files and batches, which are not served unless asked for."""
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
    register(
        "batches",
        "hookline.plugins.apis.batches.surface:Batches",
        config=BatchesConfig,
        help="OpenAI's files and batches, kept in a folder: /v1/files, /v1/batches",
    )
