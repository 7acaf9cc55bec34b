"""The host's half of the logits processors: which ones a request uses, and its arguments as plain integers.

Arguments are validated on arrival, extra_args by their size first, and a processor's code is imported when a request
first uses it. The device's half, on each rank, is `core.worker.runner.logits_pipeline`. Both halves list the processors
in the same order, so that an index names one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hookline.core.config.schema import build, unknown_key
from hookline.core.contracts import RequestFacts, TokenTexts
from hookline.core.errors import BrokenConfigError, ConfigError, PluginError, PluginFault, RequestError, shown
from hookline.core.plugin.needs import Facts, unmet
from hookline.core.plugin.processors import ProcessorStage
from hookline.core.plugin.registry import PROCESSOR, Entry, Option
from hookline.core.requests.token_followers import Follower
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.arrays import IntArray

MAX_PROCESSORS = 62
"""Most processors of an engine: a step names those that it runs in the bits of one int64."""
MAX_CACHED_KEYS_BYTES = 2**20
"""Converted arguments are cached; when the cache's keys take this much memory, all of it is dropped."""
MAX_CACHED_KEY_BYTES = 2**14
"""Arguments whose key is larger are not cached, but converted for each request."""
MAX_CHARACTERS = 65_536
"""Most characters of a request's extra_args: of all keys, texts and numbers together."""
MAX_VALUES = 1024
"""Most values of a request's extra_args: each number, text, list and mapping is one. A value costs up to 0.1 ms."""
MAX_DEPTH = 16
"""Most mappings and lists around a value of a request's extra_args, itself not counted."""


@dataclass(frozen=True)
class Prepared:
    """What a request asks of the logits processors.

    records: (processor's index, its arguments: one integer per column, then what it encoded). num_draws: (bit of the
    processor, how many of the first draws it changes; None for all). reads_tokens: whether one of them reads the
    request's tokens. bits: those of all its processors. ends: whether some change only the first draws.
    """

    records: tuple[tuple[int, IntArray], ...] = ()
    num_draws: tuple[tuple[int, int | None], ...] = ()
    reads_tokens: bool = False
    bits: int = 0
    ends: bool = False
    followers: tuple[Follower, ...] = ()

    def used(self, num_output_tokens: int) -> int:
        """Bits of the processors that change the next draw of a request with this many output tokens."""
        return sum(bit for bit, count in self.num_draws if count is None or num_output_tokens < count)


NOTHING = Prepared()


class Processing:
    """The processors of an engine, in the order they run."""

    def __init__(self, stages: Sequence[ProcessorStage] = ()) -> None:
        if len(stages) > MAX_PROCESSORS:
            raise PluginError(f"{len(stages)} logits processors are installed; at most {MAX_PROCESSORS} can be")
        self.stages = list(stages)
        self._load_tokenizer: Callable[[], TokenTexts | None] = lambda: None
        self._has_settings = any(stage.setting is not None for stage in stages)
        self._claimed = {name for stage in stages if stage.from_params for name in stage.field_names}
        self._built: dict[tuple[int, str], Any] = {}
        self._built_bytes = 0

    @classmethod
    def of(
        cls, entries: Iterable[Entry], facts: Facts | None = None, settings: Mapping[str, Option] | None = None
    ) -> Processing:
        """The processors among some plugin entries. One that does not fit the facts is refused when a request uses it.

        settings: default arguments of requests, by the processor's name.
        """
        wanted = sorted((one for one in entries if one.kind == PROCESSOR), key=lambda one: -one.priority)
        configs = {name: option.config for name, option in (settings or {}).items()}
        return cls(
            [
                ProcessorStage(entry, unmet(entry.needs, facts) if facts is not None else (), configs.get(entry.name))
                for entry in wanted
            ]
        )

    def prepare(self, params: SamplingParams, facts: RequestFacts) -> Prepared:
        """Turn a request's parameters into arguments of processors.

        Raises: RequestError for arguments that no processor takes or that one refuses, and for a processor that does
        not fit; PluginFault for one that is broken.
        """
        if not params.processed_fields and not params.extra_args and not self._has_settings:
            return NOTHING
        self._refuse_unknown(params)
        try:
            return self._prepare(params, facts)
        except PluginError as error:
            raise PluginFault(str(error)) from error

    def _prepare(self, params: SamplingParams, facts: RequestFacts) -> Prepared:
        records, followers, num_draws, reads_tokens = [], [], [], False
        for index, stage in enumerate(self.stages):
            with stage.blaming:
                arguments = self._arguments(index, stage, params)
                if arguments is None:
                    continue
                known = replace(facts, tokenizer=self._tokenizer) if stage.reads_texts else facts
                count = stage.num_draws(arguments, known)
                if count == 0:
                    continue
                if stage.is_follower:
                    followers.append(Follower(index, stage, arguments, known))
                else:
                    records.append((index, stage.encode(arguments, known)))
                num_draws.append((1 << index, count))
                reads_tokens |= stage.reads_tokens
        bits, ends = sum(bit for bit, _ in num_draws), any(count is not None for _, count in num_draws)
        return Prepared(tuple(records), tuple(num_draws), reads_tokens, bits, ends, tuple(followers))

    def use_tokenizer(self, load: Callable[[], TokenTexts | None]) -> None:
        """Give processors the tokenizer if they read texts; `load` is called when a request first uses one of them."""
        self._load_tokenizer = load

    @cached_property
    def _tokenizer(self) -> TokenTexts | None:
        return self._load_tokenizer()

    def check(self, params: SamplingParams) -> None:
        """Refuse what `prepare` would refuse by its name, type or value alone; needs no engine."""
        self._refuse_unknown(params)
        for index, stage in enumerate(self.stages):
            try:
                with stage.blaming:
                    self._arguments(index, stage, params)
            except PluginError as error:
                raise PluginFault(str(error)) from error

    def _refuse_unknown(self, params: SamplingParams) -> None:
        refuse_oversized(params.extra_args)
        for name in params.processed_fields:
            if name not in self._claimed:
                raise RequestError(
                    f"sampling.{name}={shown(getattr(params, name))}: no logits processor that takes it is loaded here"
                )
        taking = {stage.entry.name for stage in self.stages if not stage.from_params}
        for name in params.extra_args:
            if name not in taking:
                raise RequestError(unknown_key(f"sampling.extra_args.{name}", sorted(taking)))

    def _arguments(self, index: int, stage: ProcessorStage, params: SamplingParams) -> Any:
        """The processor's arguments; None if the request has none."""
        if stage.from_params:
            if not any(name in params.processed_fields for name in stage.field_names):
                return None
            return stage.arguments(**{name: getattr(params, name) for name in stage.field_names})
        given = params.extra_args.get(stage.entry.name)
        return stage.setting if given is None else self._build(index, stage, given)

    def _build(self, index: int, stage: ProcessorStage, given: Mapping[str, Any]) -> Any:
        """Arguments, checked and converted; cached, since OmegaConf takes a millisecond."""
        key = (index, repr(given))
        if key in self._built:
            return self._built[key]
        try:
            key_of_all = f"sampling.extra_args.{stage.entry.name}"
            built = build(stage.arguments, stage.arguments_of(given), key_of_all, reads_texts=False)
        except BrokenConfigError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None  # whoever is around us blames the processor
        except ConfigError as error:
            raise RequestError(str(error)) from error
        if (num_bytes := sys.getsizeof(key[1])) <= MAX_CACHED_KEY_BYTES:
            if self._built_bytes + num_bytes > MAX_CACHED_KEYS_BYTES:
                self._built.clear()
                self._built_bytes = 0
            self._built[key] = built
            self._built_bytes += num_bytes
        return built


def refuse_oversized(extra_args: Mapping[str, Any]) -> None:
    """Check the size of extra_args before any part of them is converted, kept or shown; stops at the limits.

    Raises: RequestError naming the limit.
    """
    num_characters, num_values = 0, 0
    waiting: list[tuple[Any, int]] = [(extra_args, 1)]
    while waiting:
        holder, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"sampling.extra_args is nested deeper than {MAX_DEPTH} levels; make it flatter")
        pairs = holder.items() if isinstance(holder, Mapping) else (("", value) for value in holder)
        for key, value in pairs:
            num_values += 1
            num_characters += _num_characters(key) + _num_characters(value)
            if num_values > MAX_VALUES:
                raise RequestError(f"sampling.extra_args holds more than {MAX_VALUES} values; send fewer")
            if num_characters > MAX_CHARACTERS:
                raise RequestError(f"sampling.extra_args holds more than {MAX_CHARACTERS} characters; send less")
            if isinstance(value, Mapping | list | tuple):
                waiting.append((value, depth + 1))


def _num_characters(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return value.bit_length() // 3 if isinstance(value, int) else 0
