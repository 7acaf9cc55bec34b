"""Hookline: a plugin-first LLM inference engine. The library API is imported on first use; `import core` is light."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.async_llm import AsyncLLM
    from core.llm import LLM
    from core.outputs import Delta, FinishReason, RequestOutput
    from core.sampling import SamplingParams

_HOME = {
    "AsyncLLM": "core.async_llm",
    "LLM": "core.llm",
    "Delta": "core.outputs",
    "FinishReason": "core.outputs",
    "RequestOutput": "core.outputs",
    "SamplingParams": "core.sampling",
}
__all__ = ["LLM", "AsyncLLM", "Delta", "FinishReason", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'core' has no attribute '{name}'")
