"""One logits processor of a plugin: its entry, and its code once a request uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from hookline.core.contracts import FromSamplingParams, RequestFacts, is_offered
from hookline.core.errors import PluginError, RequestError, shown
from hookline.core.plugin.blame import Blaming, breach
from hookline.core.plugin.registry import PROCESSOR, Entry
from hookline.core.util.arrays import IntArray, float_bits, ints


class ProcessorStage:
    """One processor: its entry, and its code once a request uses it."""

    def __init__(self, entry: Entry, unmet_needs: Sequence[str] = (), setting: Any = None) -> None:
        assert entry.config is not None
        self.entry, self.arguments, self.unmet_needs = entry, entry.config, unmet_needs
        self.from_params = issubclass(self.arguments, FromSamplingParams)
        self.blaming = _blaming(entry)
        with self.blaming:
            self.defaults = self.arguments()
        self.setting = setting
        """Arguments of requests that do not say otherwise, from the engine's configuration; None if it has none."""
        fields = dataclasses.fields(self.arguments)
        self.field_names = [field.name for field in fields]
        self.columns = {name: float for name in self._of_type(float)} | {
            name: int for name in [*self._of_type(int), *self._of_type(bool)]
        }
        """Name and type of each field that travels as a column: floats first."""

    def _of_type(self, kind: type) -> list[str]:
        return [name for name in self.field_names if type(getattr(self.defaults, name)) is kind]

    @cached_property
    def cls(self) -> Any:
        """The processor's class.

        Raises: PluginError if it cannot be imported, or lacks what its arguments call for; RequestError if it does not
        fit this engine.
        """
        if self.unmet_needs:
            what = f"{PROCESSOR} '{self.entry.name}' of {self.entry.origin}"
            raise RequestError(f"{what} does not fit: {'; '.join(self.unmet_needs)}")
        loaded = self.entry.load()
        others = [name for name in self.field_names if name not in self.columns]
        if others and not (is_offered(loaded.encode) and is_offered(loaded.load)):
            raise PluginError(
                f"{PROCESSOR} '{self.entry.name}' of {self.entry.origin} needs encode and load: its arguments have "
                f"'{others[0]}', whose default is neither an int, a float nor a bool"
            )
        return loaded

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads the tokens of its rows."""
        return bool(self.cls.reads_tokens)

    def arguments_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The request's values of the fields, and the engine's configuration for those it does not give."""
        if self.setting is None:
            return dict(given)
        return {**{name: getattr(self.setting, name) for name in self.field_names}, **given}

    def column_values(self, arguments: Any) -> list[int]:
        """The columns of some arguments as integers; floats as their float32 bits."""
        floats = [getattr(arguments, name) for name, kind in self.columns.items() if kind is float]
        whole = [int(getattr(arguments, name)) for name, kind in self.columns.items() if kind is int]
        return [*float_bits(floats).tolist(), *whole]

    def num_draws(self, arguments: Any, facts: RequestFacts) -> int | None:
        """See LogitsProcessor."""
        if arguments == self.defaults:
            return 0
        with _blaming(self.entry, "num_draws"):
            count = self.cls.num_draws(arguments, facts)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
                raise self._broken(
                    "num_draws", f"it returned {shown(count)}, which is neither a number of draws nor None"
                )
        return None if count is None else max(0, count)

    @property
    def reads_texts(self) -> bool:
        """Whether it is given the tokenizer."""
        return bool(self.cls.reads_texts)

    @property
    def is_follower(self) -> bool:
        """Whether it follows its requests' tokens on the host."""
        return is_offered(self.cls.start) or is_offered(self.cls.on_token)

    def start(self, arguments: Any, facts: RequestFacts) -> Any:
        """See LogitsProcessor."""
        with _blaming(self.entry, "start"):
            return self.cls.start(arguments, facts)

    def on_token(self, state: Any, token_id: int, logprob: float | None) -> str | None:
        """See LogitsProcessor.

        Raises: PluginError, also for what is neither a text nor None.
        """
        with Blaming((), "in on_token", otherwise=self.entry):
            text = self.cls.on_token(state, token_id, logprob)
            if text is not None and not isinstance(text, str):
                raise self._broken("on_token", f"it returned {shown(text)}, which is neither a text nor None")
            return text

    def encode(self, arguments: Any, facts: RequestFacts) -> IntArray:
        """The record of a request's arguments.

        Raises: RequestError for a number that its column cannot hold.
        """
        with _blaming(self.entry, "encode"):
            encoded = self.cls.encode(arguments, facts)
            encoded = [*encoded] if isinstance(encoded, Iterable) else encoded
        try:
            encoded = [index(value) for value in encoded]
            if encoded and not is_offered(self.cls.load):
                raise self._broken("encode", f"it returned {shown(encoded)}, and the class has no load to get them")
            with np.errstate(over="raise"):
                return ints([*self.column_values(arguments), *encoded])
        except (OverflowError, FloatingPointError) as error:
            limits = "an int must fit into 64 bits and a float into 32"
            raise RequestError(f"a number for {PROCESSOR} '{self.entry.name}' is too large; {limits}") from error
        except (TypeError, ValueError) as error:
            raise self._broken("encode", f"it returned {shown(encoded)}, which are not whole numbers") from error

    def _broken(self, method: str, what: str) -> PluginError:
        return PluginError(breach(self.entry, method, what))


def _blaming(entry: Entry, method: str = "") -> Blaming:
    return Blaming((), f"{f'in {method} ' * bool(method)}while a request's arguments are prepared", otherwise=entry)
