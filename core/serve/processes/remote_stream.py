"""A front end's side of one prompt's completions, whose engine is in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookline.core.frontend.completion import Completion
from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.outputs import FinishReason
from hookline.core.serve.processes.messages import End, output_of

if TYPE_CHECKING:
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.serve.engine_client import ServedModel


class RemoteStream(CompletionStream):
    """The stream of one prompt; its completions have handles in a row, from `handle` on.

    leave: see CompletionStream. prompt: its text, if it is one.
    """

    def __init__(
        self,
        leave: Callable[[RemoteStream], None],
        loop: asyncio.AbstractEventLoop,
        handle: int,
        params: SamplingParams,
        prompt: str | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(loop, params.n, leave)
        self.prompt, self.handles = prompt, range(handle, handle + params.n)
        self.info = {key: options[key] for key in ("priority", "tags", "deadline_s") if key in options}
        self.prompt_token_ids: list[int] = []
        """Known once its completions are prepared."""

    def prepare(
        self, completions: list[RemoteCompletion], token_ids: list[int], params: SamplingParams, model: ServedModel
    ) -> None:
        """Set the prompt's tokens, once they are known and before the first token of a completion comes."""
        self.prompt_token_ids = token_ids
        for completion, one in zip(completions, params.each(), strict=True):
            completion.prepare(token_ids, one, model.codec, model.eos_token_ids)


class RemoteCompletion(Completion):
    """A completion whose tokens and end come as messages. handle: its number in messages."""

    def __init__(self, stream: RemoteStream, handle: int) -> None:
        super().__init__(handle - stream.handles.start)
        self.stream = stream
        self.begin(handle, stream.notify)

    def end_with(self, end: End) -> None:
        """End with the engine's message; the stop string, if one was found, was found here."""
        stream = self.stream
        output = output_of(end, stream.prompt, stream.prompt_token_ids, self.token_ids, self.index)
        output = replace(output, **stream.info)
        if self.stop is not None:
            output = replace(output, finish_reason=FinishReason.STOP, stop_reason=self.stop, error=None, is_fault=False)
        self.end(output)
