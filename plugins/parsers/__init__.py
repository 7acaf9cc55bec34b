"""The parsers that ship with Hookline: which tags mean reasoning and tool calls. Imports no parser's code."""

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_reasoning_parsers(register: Registrar) -> None:
    """Add the parser of <think> tags."""
    register(
        "think", "hookline.plugins.parsers.think:Think", help="<think>...</think> in front of the answer: Qwen3, R1"
    )


@hookimpl
def register_tool_parsers(register: Registrar) -> None:
    """Add the parser of Hermes' and Qwen's tool calls."""
    register(
        "hermes",
        "hookline.plugins.parsers.hermes:Hermes",
        help='<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Qwen, Hermes',
    )
