"""The logits processors that follow one request's tokens on the host: their state, and what each token changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hookline.core.contracts import RequestFacts
from hookline.core.plugin.processors import ProcessorStage
from hookline.core.util.arrays import IntArray


@dataclass(frozen=True)
class Follower:
    """One processor that follows a request's tokens, and its arguments. index: of the processor among the engine's."""

    index: int
    stage: ProcessorStage
    arguments: Any
    facts: RequestFacts


class TokenFollowers:
    """The followers of one request. A request has this object only if it uses a processor that follows tokens.

    is_awaited: whether a draw depends on the token before it.
    Raises: PluginError or RequestError, what a processor's `start` raises.
    """

    def __init__(self, followers: Sequence[Follower]) -> None:
        self._states = [(one, one.stage.start(one.arguments, one.facts)) for one in followers]
        self.is_awaited = any(bool(one.stage.cls.follows_tokens) for one in followers)
        self.records: Sequence[tuple[int, IntArray]] = ()
        """(processor, its values) as of the last token."""
        self._encode()

    def see(self, token_id: int, logprob: float | None) -> str | None:
        """Show all followers a token; returns the text with which the first of them ends the request, or None.

        Raises: PluginError naming the processor that failed.
        """
        texts = [one.stage.on_token(state, token_id, logprob) for one, state in self._states]
        self._encode()
        return next((text for text in texts if text is not None), None)

    def _encode(self) -> None:
        self.records = [
            (one.index, one.stage.encode(one.arguments, replace(one.facts, state=state))) for one, state in self._states
        ]
