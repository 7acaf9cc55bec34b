"""Tool calls as a list of Python calls, `[get_weather(city="Paris"), add(a=1, b=2)]`, as Llama 3.2 writes them."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence

from hookline.core.contracts import Arguments, OutputParser, ParsedPart, ParserContext, Text, ToolCall


class Pythonic(OutputParser):
    """An answer that begins with a bracket is kept back until it ends; then it is calls, or else the text it was.

    Arguments are literals, given by name; nothing of them is run.
    """

    def __init__(self, config: None, context: ParserContext) -> None:
        self._names = {tool["name"] for tool in context.tools}
        self._kept = ""

    def push(self, text: str) -> Sequence[ParsedPart]:
        """See OutputParser."""
        self._kept += text
        begin = self._kept.lstrip()
        if not begin or begin.startswith("["):
            return []
        kept, self._kept, self.is_done = self._kept, "", True
        return [Text(kept)]

    def finish(self) -> Sequence[ParsedPart]:
        """See OutputParser."""
        kept, self._kept = self._kept, ""
        if not kept:
            return []
        try:
            return self._calls(ast.parse(kept.strip(), mode="eval").body)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return [Text(kept)]

    def _calls(self, node: ast.expr) -> list[ParsedPart]:
        """Raises: ValueError if an expression is no list of calls of the tools."""
        calls = node.elts if isinstance(node, ast.List) else []
        parts: list[ParsedPart] = []
        for call in calls:
            name = ast.unparse(call.func) if isinstance(call, ast.Call) and not call.args else None
            if name is None or name not in self._names:
                raise ValueError(f"{ast.unparse(call)} is no call of a tool")
            given = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
            if len(given) != len(call.keywords):
                raise ValueError("an argument has no name")
            parts += [ToolCall(name), Arguments(json.dumps(given))]
        if not parts:
            raise ValueError("there is no call")
        return parts
