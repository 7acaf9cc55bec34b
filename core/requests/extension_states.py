"""The host's half of one request's step extensions: their states, and the results that its client gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hookline.core.contracts import RequestFacts, is_offered
from hookline.core.errors import HooklineError, show_traceback
from hookline.core.plugin.step_extensions import HostExtension
from hookline.core.util.arrays import Array, IntArray


@dataclass(frozen=True)
class UsedExtension:
    """An extension that a request uses, and its arguments. index: its place among the engine's extensions.

    num_draws: how many of the request's first draws it takes part in; None for all.
    """

    index: int
    stage: HostExtension
    arguments: Any
    facts: RequestFacts
    num_draws: int | None = None


class ExtensionStates:
    """The states of one request's extensions on the host, and their results. A request has this object only if one of
    its extensions follows its tokens, or has results for it.

    is_awaited: whether a draw depends on the token before it. is_following: whether an extension must see the tokens.
    Raises: PluginError or RequestError from an extension's `start`.
    """

    def __init__(self, used: Sequence[UsedExtension]) -> None:
        self._used = [(one, one.stage.start(one.arguments, one.facts)) for one in used if _has_state(one)]
        self._states = [(one, state) for one, state in self._used if one.stage.is_follower]
        self.is_awaited = any(bool(one.stage.cls.follows_tokens) for one, _ in self._states)
        self._results: dict[str, list[Any]] = {
            one.stage.entry.name: [] for one, _ in self._used if one.stage.has_results
        }
        self.is_following = bool(self._states) or bool(self._results)
        self.records: Sequence[tuple[int, IntArray]] = ()
        """(index of the extension, its encoded values) after the last token."""
        self._fault: HooklineError | None = None
        self._encode()

    @property
    def has_failed(self) -> bool:
        """Whether an extension failed in `on_result`."""
        return self._fault is not None

    def see(self, token_id: int, logprob: float | None) -> str | None:
        """Pass a token to all extensions that follow tokens; returns the first text that ends the request, or None.

        Raises: PluginError naming the extension that failed, with this token or in its results.
        """
        if self._fault is not None:
            raise self._fault
        if not self._states:
            return None
        texts = [one.stage.on_token(state, token_id, logprob) for one, state in self._states]
        self._encode()
        return next((text for text in texts if text is not None), None)

    def add_result(self, name: str, values_W: Array) -> None:
        """Keep an extension's numbers from the device for the next token; ignored if it takes no part in that draw.

        A fault is kept for `see`.
        """
        kept = self._results.get(name)
        if kept is None:
            return
        one, state = next((one, state) for one, state in self._used if one.stage.entry.name == name)
        if one.num_draws is not None and len(kept) >= one.num_draws:
            return
        try:
            kept.append(one.stage.on_result(state, values_W))
        except HooklineError as error:
            self._fault = self._fault or error

    def drop_last(self, num_tokens: int) -> None:
        """Forget results beyond this number of tokens, which are no part of the answer."""
        for kept in self._results.values():
            del kept[num_tokens:]

    def results(self, first: int = 0) -> dict[str, list[Any]] | None:
        """By extension, the client's results for each of the tokens from number `first` on; None without extensions."""
        return {name: kept[first:] for name, kept in self._results.items()} if self._results else None

    def forget(self) -> None:
        """Tell the extensions that the request has ended; an error is logged with the extension's name."""
        used, self._used = self._used, []
        for one, state in used:
            if is_offered(one.stage.cls.forget):
                try:
                    one.stage.forget(state)
                except HooklineError as error:
                    show_traceback(error)

    def _encode(self) -> None:
        self.records = [
            (one.index, one.stage.encode(one.arguments, replace(one.facts, state=state))) for one, state in self._states
        ]


def _has_state(one: UsedExtension) -> bool:
    return one.stage.is_follower or one.stage.has_results
