"""The host's half of one step extension: its entry, and its code once a request uses it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from hookline.core.contracts import ExtensionCost, FromSamplingParams, RequestFacts, is_offered
from hookline.core.errors import PluginError, RequestError, shown
from hookline.core.plugin.blame import Blaming, breach
from hookline.core.plugin.needs import Facts, unmet
from hookline.core.plugin.registry import Entry, ExtensionOption
from hookline.core.util.arrays import Array, IntArray, float_bits, ints

_PLAIN = (bool, int, float, str, type(None))


class HostExtension:
    """An extension. facts: of the engine, if they are known. option: its settings in the engine's configuration."""

    def __init__(self, entry: Entry, facts: Facts | None = None, option: ExtensionOption | None = None) -> None:
        assert entry.arguments is not None
        self.entry, self.arguments, self._facts = entry, entry.arguments, facts
        self.unmet_needs = [] if facts is None else unmet(entry.needs, facts)
        self.from_params = issubclass(self.arguments, FromSamplingParams)
        self.blaming = _blaming(entry)
        self.cost = ExtensionCost()
        """The time that it took so far, in this engine."""
        with self.blaming:
            self.defaults = self.arguments()
            self.config = option.config if option is not None else None if entry.config is None else entry.config()
        self.setting = None if option is None else option.arguments
        """Defaults of requests' arguments, from the engine's configuration; None if they are not set."""
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
        """The extension's class.

        Raises: PluginError if it cannot be imported, or lacks a method that its arguments require; RequestError if it
                does not fit this engine.
        """
        if self.unmet_needs:
            raise RequestError(f"{self.entry} does not fit: {'; '.join(self.unmet_needs)}")
        loaded = self.entry.load()
        if fault := self._unfit(loaded):
            raise RequestError(f"{self.entry} does not fit: {fault}")
        others = [name for name in self.field_names if name not in self.columns]
        if others and not (is_offered(loaded.encode) and is_offered(loaded.load)):
            raise PluginError(
                f"{self.entry} needs encode and load: its arguments have '{others[0]}', whose default is neither an "
                "int, a float nor a bool"
            )
        return loaded

    def _unfit(self, loaded: Any) -> str | None:
        """Why the extension cannot be used with this engine; None if it can."""
        facts = self._facts
        if facts is None:
            return None
        for name, count in (("tp", facts.num_ranks), ("pp", facts.num_stages)):
            if count > 1 and name in loaded.excludes:
                return f"{name} is {count}, and it works with {name}=1 only"
        if facts.batch_invariant and is_offered(loaded.after_layer):
            return "engine.batch_invariant is true, and it changes hidden states"
        return None

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads the tokens of its rows."""
        return bool(self.cls.reads_tokens)

    def arguments_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the arguments' fields: the request's, and for missing ones the engine's."""
        if self.setting is None:
            return dict(given)
        return {**{name: getattr(self.setting, name) for name in self.field_names}, **given}

    def column_values(self, arguments: Any) -> list[int]:
        """The values of the arguments' columns as integers; floats as their float32 bits."""
        floats = [getattr(arguments, name) for name, kind in self.columns.items() if kind is float]
        whole = [int(getattr(arguments, name)) for name, kind in self.columns.items() if kind is int]
        return [*float_bits(floats).tolist(), *whole]

    def num_draws(self, arguments: Any, facts: RequestFacts) -> int | None:
        """See StepExtension."""
        if arguments == self.defaults:
            return 0
        with self._timed(_blaming(self.entry, "num_draws")):
            count = self.cls.num_draws(arguments, facts)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
                raise self._broken(
                    "num_draws", f"it returned {shown(count)}, which is neither a number of draws nor None"
                )
        return None if count is None else max(0, count)

    @property
    def draw_method(self) -> str:
        """Name of its method that changes logits."""
        return str(self.cls.draw_method)

    @property
    def changes_logits(self) -> bool:
        """Whether it changes logits."""
        return is_offered(getattr(self.cls, self.draw_method))

    @property
    def reads_texts(self) -> bool:
        """Whether it is given the tokenizer."""
        return bool(self.cls.reads_texts)

    @property
    def is_follower(self) -> bool:
        """Whether it follows its requests' tokens on the host."""
        return is_offered(self.cls.start) or is_offered(self.cls.on_token)

    @property
    def has_results(self) -> bool:
        """Whether it computes numbers for the host."""
        return is_offered(self.cls.after_draw)

    @property
    def changes_stream(self) -> bool:
        """Whether it changes hidden states, on which the cached keys and values of its requests then depend."""
        return is_offered(self.cls.after_layer)

    def start(self, arguments: Any, facts: RequestFacts) -> Any:
        """See StepExtension."""
        with self._timed(_blaming(self.entry, "start")):
            return self.cls.start(arguments, facts)

    def on_token(self, state: Any, token_id: int, logprob: float | None) -> str | None:
        """See StepExtension.

        Raises: PluginError, also for a result that is neither a text nor None.
        """
        with self._timed(Blaming((), "in on_token", otherwise=self.entry)):
            text = self.cls.on_token(state, token_id, logprob)
            if text is not None and not isinstance(text, str):
                raise self._broken("on_token", f"it returned {shown(text)}, which is neither a text nor None")
            return text

    def on_result(self, state: Any, values_W: Array) -> Any:
        """See StepExtension. Raises: PluginError, also for a result that JSON cannot hold."""
        with self._timed(Blaming((), "in on_result", otherwise=self.entry)):
            found = self.cls.on_result(state, values_W.copy())
            if not is_plain(found):
                raise self._broken(
                    "on_result", f"it returned {shown(found)}, which is no plain data that JSON can hold"
                )
            return found

    def forget(self, state: Any) -> None:
        """See StepExtension. Raises: PluginError."""
        with self._timed(Blaming((), "in forget", otherwise=self.entry)):
            self.cls.forget(state)

    def encode(self, arguments: Any, facts: RequestFacts) -> IntArray:
        """A request's arguments as int64 values: the columns, then the values that the class's `encode` returns.

        Raises: RequestError for a number that its column cannot hold.
        """
        with self._timed(_blaming(self.entry, "encode")):
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
            raise RequestError(f"a number for {self.entry.kind} '{self.entry.name}' is too large; {limits}") from error
        except (TypeError, ValueError) as error:
            raise self._broken("encode", f"it returned {shown(encoded)}, which are not whole numbers") from error

    @contextmanager
    def _timed(self, blaming: Blaming) -> Iterator[None]:
        """Around a call of the extension: count its time, and turn its errors into PluginErrors."""
        started_s = time.perf_counter()
        try:
            with blaming:
                yield
        finally:
            self.cost.add_host(time.perf_counter() - started_s)

    def _broken(self, method: str, what: str) -> PluginError:
        return PluginError(breach(self.entry, method, what))


def is_plain(value: Any) -> bool:
    """Whether it is made of texts, numbers, bools, None, lists and mappings by texts alone, as JSON is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_plain, value.values()))
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


def _blaming(entry: Entry, method: str = "") -> Blaming:
    return Blaming((), f"{f'in {method} ' * bool(method)}while a request's arguments are prepared", otherwise=entry)
