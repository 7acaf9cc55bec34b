"""The host's half of the step extensions: which ones a request uses, and its arguments as plain integers.

Arguments are validated on arrival, extra_args by their size first, and an extension's code is imported when a request
first uses it. The device's half, on each rank, is `core.worker.runner.step_extensions`. Both halves list the extensions
in the same order, so that an index names one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any

from hookline.core.config.schema import build, unknown_key
from hookline.core.contracts import ExtensionCost, RequestFacts, TokenTexts
from hookline.core.errors import BrokenConfigError, ConfigError, PluginError, PluginFault, RequestError, shown
from hookline.core.plugin.needs import Facts
from hookline.core.plugin.registry import EXTENSION_KINDS, Entry, ExtensionOption
from hookline.core.plugin.step_extensions import HostExtension
from hookline.core.requests.extension_states import UsedExtension
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.arrays import Array, IntArray

MAX_EXTENSIONS = 62
"""Most extensions of an engine: a step names the extensions that it runs by the bits of one int64."""
MAX_CACHED_KEYS_BYTES = 2**20
"""Converted arguments are cached; when the cache's keys take this much memory, all of it is dropped."""
MAX_CACHED_KEY_BYTES = 2**14
"""Arguments whose key is larger are not cached, but converted for each request."""
MAX_CHARACTERS = 65_536
"""Most characters of a request's extra_args: of all keys, texts and numbers together."""
MAX_VALUES = 1024
"""Most values of a request's extra_args: each number, text, list and mapping is one. A value costs up to 0.1 ms."""
_FIELDS = {one.name: one.default for one in fields(SamplingParams) if one.default is not MISSING}
"""Sampling parameters that an extension can exclude, and their values in requests that leave them out."""
MAX_DEPTH = 16
"""Most mappings and lists around a value of a request's extra_args, itself not counted."""


@dataclass(frozen=True)
class Prepared:
    """The extensions that a request uses, and its arguments for them.

    records: (extension's index, its arguments: one integer per column, then the values of its `encode`). num_draws:
    (bit of the extension, how many of the first draws it changes; None for all). reads_tokens: whether an extension
    reads the request's tokens. bits: the bits of all its extensions. ends: whether some change only the first draws.
    """

    records: tuple[tuple[int, IntArray], ...] = ()
    num_draws: tuple[tuple[int, int | None], ...] = ()
    reads_tokens: bool = False
    bits: int = 0
    ends: bool = False
    stateful: tuple[UsedExtension, ...] = ()
    """The extensions that follow its tokens on the host, or have results for it."""
    layer_bits: int = 0
    """Bits of the extensions that change hidden states, also while its prompt is computed."""
    stream_key: bytes | None = None
    """The arguments on which its hidden states depend, and so its cached prompt; None if no extension changes them.
    Empty if they may depend on more than arguments and tokens."""

    def prefix_root(self, root: int, id: int) -> int:
        """The parent of the request's first block in the prefix cache, in place of `root`: see RequestOptions."""
        if self.stream_key is None:
            return root
        told = repr((root, self.stream_key or id)).encode()
        return (1 << 128) + int.from_bytes(hashlib.blake2b(told, digest_size=16).digest(), "little")

    def used(self, num_output_tokens: int) -> int:
        """Bits of the extensions that change the next draw of a request with this many output tokens."""
        return sum(bit for bit, count in self.num_draws if count is None or num_output_tokens < count)


NOTHING = Prepared()


class InstalledExtensions:
    """The extensions of an engine, in the order they run."""

    def __init__(self, stages: Sequence[HostExtension] = ()) -> None:
        if len(stages) > MAX_EXTENSIONS:
            raise PluginError(f"{len(stages)} step extensions are installed; at most {MAX_EXTENSIONS} can be")
        self.stages = list(stages)
        self._load_tokenizer: Callable[[], TokenTexts | None] = lambda: None
        self.has_settings = any(stage.setting is not None for stage in stages)
        """Whether the engine's settings make requests use an extension without asking for it."""
        self.costs: dict[str, ExtensionCost] = {stage.entry.name: stage.cost for stage in stages}
        """The time that each extension took so far, by name."""
        self._claimed = {name for stage in stages if stage.from_params for name in stage.field_names}
        self._built: dict[tuple[int, str], Any] = {}
        self._built_bytes = 0

    @classmethod
    def of(
        cls, entries: Iterable[Entry], facts: Facts | None = None, settings: Mapping[str, ExtensionOption] | None = None
    ) -> InstalledExtensions:
        """The extensions among these entries. If one does not fit the facts, requests that use it are refused.

        settings: their settings in the engine's configuration, by name.
        """
        wanted = sorted((one for one in entries if one.kind in EXTENSION_KINDS), key=lambda one: -one.priority)
        return cls([HostExtension(entry, facts, (settings or {}).get(entry.name)) for entry in wanted])

    def prepare(self, params: SamplingParams, facts: RequestFacts) -> Prepared:
        """Turn a request's parameters into arguments of extensions.

        Raises: RequestError for arguments that no extension takes or that an extension refuses, and for an extension
        that does not fit; PluginFault for a broken extension.
        """
        if not params.processed_fields and not params.extra_args and not self.has_settings:
            return NOTHING
        self._refuse_unknown(params)
        try:
            return self._prepare(params, facts)
        except PluginError as error:
            raise PluginFault(str(error)) from error

    def _prepare(self, params: SamplingParams, facts: RequestFacts) -> Prepared:
        records, stateful, num_draws, reads_tokens = [], [], [], False
        used: dict[str, HostExtension] = {}
        for index, stage in enumerate(self.stages):
            with stage.blaming:
                arguments = self._arguments(index, stage, params)
                if arguments is None:
                    continue
                known = replace(facts, tokenizer=self._tokenizer) if stage.reads_texts else facts
                count = stage.num_draws(arguments, known)
                if count == 0:
                    continue
                if stage.is_follower or stage.has_results:
                    stateful.append(UsedExtension(index, stage, arguments, known, count))
                if not stage.is_follower:
                    records.append((index, stage.encode(arguments, known)))
                num_draws.append((1 << index, count))
                reads_tokens |= stage.reads_tokens
                used[stage.entry.name] = stage
        _refuse_excluded(used, params)
        bits, ends = sum(bit for bit, _ in num_draws), any(count is not None for _, count in num_draws)
        changing = [index for index, stage in enumerate(self.stages) if bits >> index & 1 and stage.changes_stream]
        key = None if not changing else b""
        if changing and not ends and not any(self.stages[index].is_follower for index in changing):
            key = repr([(index, values.tolist()) for index, values in records if index in changing]).encode()
        layer_bits = sum(1 << index for index in changing)
        return Prepared(tuple(records), tuple(num_draws), reads_tokens, bits, ends, tuple(stateful), layer_bits, key)

    def note_step(self, extensions: int, seconds_X2: Array | None) -> None:
        """Count a step that ran the extensions with these bits.

        seconds_X2: (X, 2), index and seconds of each extension that was timed on the device; None for none.
        """
        for index, stage in enumerate(self.stages):
            if extensions >> index & 1:
                stage.cost.add_step()
        for index, seconds in () if seconds_X2 is None else seconds_X2.tolist():
            self.stages[int(index)].cost.add_device(seconds)

    def use_tokenizer(self, load: Callable[[], TokenTexts | None]) -> None:
        """Give the tokenizer to extensions that read texts; `load` is called when a request first uses such one."""
        self._load_tokenizer = load

    @cached_property
    def _tokenizer(self) -> TokenTexts | None:
        return self._load_tokenizer()

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters that `prepare` would refuse for their names, types or values; needs no engine."""
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
                    f"sampling.{name}={shown(getattr(params, name))}: no step extension that takes it is loaded here"
                )
        taking = {stage.entry.name for stage in self.stages if not stage.from_params}
        for name in params.extra_args:
            if name not in taking:
                raise RequestError(unknown_key(f"sampling.extra_args.{name}", sorted(taking)))

    def _arguments(self, index: int, stage: HostExtension, params: SamplingParams) -> Any:
        """The extension's arguments; None if the request has none."""
        if stage.from_params:
            if not any(name in params.processed_fields for name in stage.field_names):
                return None
            return stage.arguments(**{name: getattr(params, name) for name in stage.field_names})
        given = params.extra_args.get(stage.entry.name)
        return stage.setting if given is None else self._build(index, stage, given)

    def _build(self, index: int, stage: HostExtension, given: Mapping[str, Any]) -> Any:
        """Arguments, checked and converted; cached, since OmegaConf takes a millisecond."""
        key = (index, repr(given))
        if key in self._built:
            return self._built[key]
        try:
            key_of_all = f"sampling.extra_args.{stage.entry.name}"
            built = build(stage.arguments, stage.arguments_of(given), key_of_all, reads_texts=False)
        except BrokenConfigError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None  # the caller's `blaming` names the extension
        except ConfigError as error:
            raise RequestError(str(error)) from error
        if (num_bytes := sys.getsizeof(key[1])) <= MAX_CACHED_KEY_BYTES:
            if self._built_bytes + num_bytes > MAX_CACHED_KEYS_BYTES:
                self._built.clear()
                self._built_bytes = 0
            self._built[key] = built
            self._built_bytes += num_bytes
        return built


def _refuse_excluded(used: Mapping[str, HostExtension], params: SamplingParams) -> None:
    """Refuse a request that uses an extension together with something that the extension excludes."""
    for name, stage in used.items():
        for other in stage.cls.excludes:
            given = getattr(params, other, None) if other in _FIELDS else None
            if other in used or given != _FIELDS.get(other):
                field = f"sampling.{other}" if other in _FIELDS else f"sampling.extra_args.{other}"
                raise RequestError(f"{stage.entry.kind} '{name}' excludes {field}; leave one of them out")


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
