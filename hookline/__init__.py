"""Hookline: a plugin-first LLM inference engine. Names are imported on first use, so `import hookline` is light."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.core.frontend.async_llm import AsyncLLM
    from hookline.core.frontend.llm import LLM
    from hookline.core.frontend.relevance import PairTemplate
    from hookline.core.outputs import Delta, FinishReason, RequestOutput
    from hookline.core.pooling_params import PoolingParams
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.structured_outputs import StructuredOutputs

    __version__: str

_HOME = {
    "AsyncLLM": "frontend.async_llm",
    "LLM": "frontend.llm",
    "Delta": "outputs",
    "FinishReason": "outputs",
    "PairTemplate": "frontend.relevance",
    "PoolingParams": "pooling_params",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "structured_outputs",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "Delta",
    "FinishReason",
    "PairTemplate",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"hookline.core.{_HOME[name]}"), name)
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("hookline")
    raise AttributeError(f"module 'hookline' has no attribute '{name}'")
