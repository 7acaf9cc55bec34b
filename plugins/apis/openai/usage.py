"""The usage and the finish reason of an answer in OpenAI's terms."""

from __future__ import annotations

from typing import Any

from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.serving import Usage


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage of completions and chat completions."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def finish_reason(output: RequestOutput, *, has_calls: bool = False) -> str:
    """Why a completion ended."""
    return "tool_calls" if has_calls and output.finish_reason is FinishReason.STOP else output.finish_reason.value
