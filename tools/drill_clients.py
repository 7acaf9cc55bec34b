"""Clients of other people against a server: typed answers and tools, read by each client's own parser.

python tools/drill_clients.py URL MODEL: by the Python that has them installed (instructor, langchain-openai, outlines,
pydantic-ai-slim[openai]), which need not have Hookline. Prints a line for each; exits with 1 if one fails.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Any

from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION = "Who wrote textwrap?"


class Mood(Enum):
    GLAD = "glad"
    SAD = "sad"


class Answer(BaseModel):
    """What is asked for: nested, with an enumeration, bounds and something that may be left out."""

    name: str = Field(max_length=12)
    mood: Mood
    year: int = Field(ge=1990, le=2030)
    tags: list[str] = Field(max_length=2)
    note: str | None = None


def by_instructor(url: str, model: str) -> Any:
    import instructor

    found = []
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        found.append(
            client.chat.completions.create(
                model=model, response_model=Answer, messages=[{"role": "user", "content": QUESTION}], max_retries=0
            )
        )
    return found


def by_langchain(url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=url, api_key="none", model=model)
    methods: Any = ("json_schema", "function_calling")
    return [chat.with_structured_output(Answer, method=method).invoke(QUESTION) for method in methods]


def by_outlines(url: str, model: str) -> Any:
    import outlines

    text = outlines.from_openai(OpenAI(base_url=url, api_key="none"), model)(QUESTION, Answer)
    return [Answer.model_validate_json(text)]


def by_pydantic_ai(url: str, model: str) -> Any:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    found = []
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (NativeOutput(Answer), ToolOutput(Answer)):
            agent: Any = Agent(kind(model, provider=provider), output_type=output, retries=0)
            found.append(agent.run_sync(QUESTION).output)
    return found


CLIENTS: dict[str, Callable[[str, str], Any]] = {
    "instructor": by_instructor,
    "langchain-openai": by_langchain,
    "outlines": by_outlines,
    "pydantic-ai-slim": by_pydantic_ai,
}


def main(url: str, model: str) -> int:
    """Ask by each client; the exit code."""
    num_failed = 0
    for name, ask in CLIENTS.items():
        try:
            answers = ask(url, model)
            wrong = [one for one in answers if not isinstance(one, Answer)]
            told = f"{len(answers)} typed answers" if not wrong else f"failed: {wrong[0]!r} is no Answer"
            num_failed += bool(wrong)
        except Exception:  # each client has errors of its own
            num_failed += 1
            told = f"failed:\n{traceback.format_exc()}"
        print(f"{name} {version(name)}: {told}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
