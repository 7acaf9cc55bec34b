"""A conversation with an engine in this process: its messages, and answers in parts as they come."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from hookline.core.chat.settings import ChatRun
from hookline.core.contracts import ParsedPart, Reasoning, Text
from hookline.core.errors import ConfigError, RequestError
from hookline.core.frontend.llm import LLM
from hookline.core.outputs import FinishReason
from hookline.core.serve.parsers import PartsReader, parser_context


class Conversation:
    """Messages and their answers. A message with an answer, whole or in part, is kept; a refused message is not.

    Raises: ConfigError if the checkpoint has no chat template.
    """

    def __init__(self, llm: LLM, run: ChatRun) -> None:
        if not getattr(llm.codec.tokenizer, "chat_template", None):
            raise ConfigError(
                "the checkpoint has no chat template, so it is not made for conversations; take an instruct "
                "checkpoint, or hookline run, which completes texts"
            )
        self._llm, self._run = llm, run
        self.finish_reason: FinishReason | None = None
        """How the last answer ended; None while it goes on."""
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone."""
        system = self._run.system
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def take_back(self) -> str | None:
        """Take the last message and its answer out; returns the message, or None if there is none."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            return None
        del self._messages[-1]
        message: str = self._messages.pop()["content"]
        return message

    def answer(self, message: str) -> Generator[Text | Reasoning, None, None]:
        """Send a message, and yield the answer's text and reasoning as they come; closed early, the answer ends there.

        A step without new text yields an empty text, so that the answer can be stopped there.
        Raises: RequestError if the message cannot be answered; the conversation then goes on without the message.
        """
        before = len(self._messages)
        self._messages.append({"role": "user", "content": message})
        found: dict[type, str] = {Reasoning: "", Text: ""}
        try:
            for part in self._parts():
                if isinstance(part, Text | Reasoning):
                    found[type(part)] += part.text
                    yield part
        finally:
            answer = {"role": "assistant", "content": found[Text].strip()}
            if found[Reasoning]:
                answer["reasoning_content"] = found[Reasoning]
            if found[Text] or found[Reasoning] or self.finish_reason is FinishReason.STOP:
                self._messages.append(answer)
            else:
                del self._messages[before:]

    def _parts(self) -> Iterator[ParsedPart]:
        codec, parser = self._llm.codec, self._run.parser
        self.finish_reason = None
        prompt = codec.render_chat(self._messages, add_generation_prompt=True, **self._run.template)
        context = parser_context(prompt, ())
        reader = PartsReader([] if parser is None else [(parser.make(context), parser.entry)])
        token_ids = codec.encode_text(prompt, add_special_tokens=False)
        for delta in self._llm.stream([token_ids], self._run.params):
            parts = reader.push(delta.text)
            if delta.output is None:
                yield from parts or [Text("")]
                continue
            if delta.output.error is not None:
                raise RequestError(delta.output.error)
            self.finish_reason = delta.output.finish_reason
            yield from [*parts, *reader.finish()]
