"""The sampling parameters of a request, validated on arrival. Imports no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from itertools import islice
from typing import Any

import xxhash

from hookline.core.errors import RequestError, shown, shown_key
from hookline.core.structured_outputs import StructuredOutputs
from hookline.core.util.stop_strings import StopStrings
from hookline.core.util.text import near_miss

MAX_SEED = 2**63 - 1
"""Largest seed: the largest int64."""
MAX_COMPLETIONS = 1024
"""Largest n."""
MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for."""
MAX_WHOLE = 2**63 - 1
"""Largest whole number of any parameter: the largest int64."""
MAX_TOP_K = 2**31 - 1
"""A larger top_k counts as this one, which is more than any vocabulary has."""
MAX_STOPS = 1024
"""Most stop strings."""
MAX_STOP_CHARACTERS = 16_384
"""Most characters of all stop strings together: each takes 16 bytes, and 2 us to prepare the search."""
MAX_STOP_TOKEN_IDS = 4096
"""Most stop_token_ids: until min_tokens are there, each step names all of them to the device."""
MAX_BIASES = 16_384
"""Most entries of logit_bias."""
MAX_ALLOWED_TOKEN_IDS = 2**20
"""Most allowed_token_ids: more than any vocabulary has."""
MAX_BAD_WORDS = 1024
"""Most bad_words."""
MAX_BAD_WORD_CHARACTERS = 16_384
"""Most characters of all bad_words that are texts together."""
MAX_BAD_WORD_TOKEN_IDS = 16_384
"""Most token ids of all bad_words that are lists together."""
_MAX_ID_DIGITS = 20
"""A text with more digits is no token id, and int() takes long or refuses it."""


def number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """A finite number of [low, high], or of (low, high] if `above`; as a float32 too, which the device gets.

    Raises: RequestError for anything else, naming sampling.`name`, the value and the range. So do all checks below.
    """
    found = as_float(value)
    is_inside = low <= found <= high and not (above and found == low)
    single = array("f", (found,))[0]  # as a float32; infinite where it has none
    if not is_inside or not math.isfinite(single) or (above and single == low):
        kind = " as a float32" if is_inside and math.isfinite(found) else ""
        raise RequestError(f"sampling.{name}={shown(value)} must be {_allowed(low, high, above)}{kind}")
    return found


def as_float(value: object) -> float:
    """An int or a float as a float: infinite if it is too large for one; NaN if it is neither, as a bool is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def _allowed(low: float, high: float, above: bool) -> str:
    if low == -math.inf and high == math.inf:
        return "a finite number"
    if high == math.inf:
        return f"a finite number {'above' if above else 'of at least'} {low:g}"
    return f"a number above {low:g} and at most {high:g}" if above else f"a number between {low:g} and {high:g}"


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number of at least `low` and at most `high`, by default the largest int64. Raises: RequestError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"sampling.{name}={shown(value)} must be a whole number")
    if low <= value <= (MAX_WHOLE if high is None else high):
        return value
    bounds = f"between {low} and {high}" if high is not None else f"at least {low}"
    raise RequestError(f"sampling.{name}={shown(value)} must be {bounds if value < low or high else 'at most 2**63-1'}")


def flag(name: str, value: object) -> None:
    """Accept a bool; 0 and "true" are refused. Raises: RequestError."""
    if not isinstance(value, bool):
        raise RequestError(f"sampling.{name}={shown(value)} is not a bool")


def texts(name: str, values: object, most: int, most_characters: int) -> tuple[str, ...]:
    """A text or a list of texts as a tuple: at most `most` texts, none of them empty, of most_characters in all.

    Raises: RequestError.
    """
    found = (values,) if isinstance(values, str) else values
    if isinstance(found, list | tuple):
        _at_most(name, len(found), most, "texts")
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) and text for text in found):
        raise RequestError(f"sampling.{name}={shown(values)} must be a text or a list of texts, none of them empty")
    _at_most(name, sum(map(len, found)), most_characters, "characters in all")
    return tuple(found)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestError(f"sampling.{name} has {count} {what}; at most {most} are allowed")


def token_ids(name: str, values: object, most: int) -> tuple[int, ...]:
    """At most this many token ids of at least 0; the engine checks them by its vocabulary. Raises: RequestError."""
    ids = _items(values, most)
    if ids is None:
        raise RequestError(f"sampling.{name}={shown(values)} must be a list of token ids")
    if len(ids) > most:
        raise RequestError(f"sampling.{name} has more than {most} token ids, which is the most it may have")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_WHOLE:  # quicker than one by one
        for token_id in ids:
            whole(name, token_id, 0)
    return ids


def _items(values: object, most: int) -> tuple[Any, ...] | None:
    """The items of a collection that is no text, at most one more than allowed; None if it is no collection."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    try:
        return tuple(islice(values, most + 1))
    except TypeError:  # an array without dimensions says that it is iterable
        return None


def biases(name: str, values: object) -> dict[int, float]:
    """Token id -> finite number added to its logit. JSON's keys are texts, so a text may hold the id.

    Raises: RequestError for another type, a negative id, a number that no float32 holds, or more than MAX_BIASES.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling.{name}={shown(values)} must be a mapping of token ids to numbers")
    check_number_of_biases(len(values), name)
    found = {}
    for key, value in values.items():
        is_id = isinstance(key, str) and key.isdecimal() and len(key) <= _MAX_ID_DIGITS
        token_id = whole(f"{name} key", int(key) if is_id else key, 0)
        found[token_id] = number(f"{name}[{token_id}]", value, -math.inf)
    return found


def check_number_of_biases(count: int, name: str = "logit_bias") -> None:
    """Raises: RequestError if there are more than MAX_BIASES."""
    _at_most(name, count, MAX_BIASES, "tokens")


def words(name: str, values: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or their token ids; none of them empty, and no more than the limits on bad_words. Raises: RequestError."""
    items = None if isinstance(values, Mapping) else _items(values, MAX_BAD_WORDS)
    if items is None:
        raise RequestError(f"sampling.{name}={shown(values)} must be a list of texts or of lists of token ids")
    if len(items) > MAX_BAD_WORDS:
        raise RequestError(f"sampling.{name} has more than {MAX_BAD_WORDS} words, which is the most it may have")
    _at_most(name, sum(len(one) for one in items if isinstance(one, str)), MAX_BAD_WORD_CHARACTERS, "characters in all")
    found = [one if isinstance(one, str) else token_ids(name, one, MAX_BAD_WORD_TOKEN_IDS) for one in items]
    _at_most(name, sum(len(one) for one in found if not isinstance(one, str)), MAX_BAD_WORD_TOKEN_IDS, "ids in all")
    for place, one in enumerate(found):
        if not one:
            raise RequestError(f"sampling.{name}[{place}] is an empty word")
        if isinstance(one, str) and not one.strip():
            told = "is white space alone; give the token ids of such a word"
            raise RequestError(f"sampling.{name}[{place}]={shown(one)} {told}")
    return tuple(found)


def extra_args(name: str, values: object) -> dict[str, dict[str, Any]]:
    """Extension name -> its arguments. The engine checks the names and the types, which only its extensions know.

    Raises: RequestError for anything but a mapping of texts to mappings.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling.{name}={shown(values)} must be a mapping of extensions to their arguments")
    for key, arguments in values.items():
        if not isinstance(key, str) or not isinstance(arguments, Mapping):
            place = f"sampling.{name}.{shown_key(key)}={shown(arguments)}"
            raise RequestError(f"{place} must be a mapping of the extension's arguments")
    return {key: dict(arguments) for key, arguments in values.items()}


NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Values of fields that are None, if the checkpoint's generation_config.json does not set them either."""
UNTRUNCATED: Mapping[str, Any] = {name: value for name, value in NEUTRAL.items() if name != "temperature"}
"""Values that override the truncation and penalty of a generation_config.json, for loads that are compared."""


def derived_seed(seed: int, number: int) -> int:
    """The seed of completion `number` of a request with this seed: the same on every machine, at most MAX_SEED."""
    return xxhash.xxh64_intdigest(f"{seed}:{number}".encode()) & MAX_SEED


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature, top_k, top_p, min_p and repetition_penalty are None unless set: the checkpoint's generation_config.json
    decides then; where it says nothing, they are 1, 0, 1, 0 and 1.

    Order: min_tokens' stop tokens, bias, allowed tokens, bad words, penalties, then temperature, top_k, top_p and
    min_p, each applied to the result of the one before, as in transformers. Step extensions run in the order of their
    priorities. Temperature 0 takes the largest logit, whatever top_k, top_p and min_p are. If parameters together
    forbid every token, any token may be sampled.

    Limits, in core/sampling_params.py: 1,024 stop strings with 16,384 characters in all; 1,024 bad_words with 16,384
    characters and 16,384 token ids; 4,096 stop_token_ids; 16,384 tokens with a bias; 2**20 allowed_token_ids. Numbers
    must be finite as a float32, whole numbers below 2**63. The plugin that applies a field may have lower limits.
    Raises: RequestError naming the field, the value and the allowed range.
    """

    temperature: float | None = None
    """Dimensionless, >= 0; 0 means greedy."""
    max_tokens: int | None = 64
    """Most tokens to generate, >= 1; None: as many as there is room for."""
    min_tokens: int = 0
    """Fewest tokens to generate before an end-of-sequence or stop token may be drawn."""
    seed: int | None = None
    """Makes the sampling of this request reproducible, whatever other requests run; None derives a seed from the
    engine's seed and the request's number."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the request; the token is in token_ids, but not in the text."""
    ignore_eos: bool = False
    """Do not stop at the checkpoint's end-of-sequence tokens."""
    n: int = 1
    """Completions of the prompt, 1 to 1024. The first is sampled with `seed`, the others with seeds derived from it."""
    stop: tuple[str, ...] = ()
    """A text, or several, that end the request once min_tokens are generated: the stop string that is complete first
    ends it, and the text ends before it. The token that completes it is the last token."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    top_k: int | None = None
    """Draw from the k most likely tokens, ties with the last one included; 0 or -1: from all."""
    top_p: float | None = None
    """Draw from the most likely tokens that together reach this probability, in (0, 1]; 1: from all."""
    min_p: float | None = None
    """Draw from the tokens at least min_p times as likely as the most likely token, in [0, 1]; 0: from all."""
    repetition_penalty: float | None = None
    """> 0; logits of tokens in prompt or output are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; the same, for each time the token is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If not None, the only tokens that may be drawn."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or lists of token ids: the last token of such a word is not sampled after the tokens before it."""
    logprobs: int | None = None
    """0 to 20: return every token's log-probability under the model, and this many most likely tokens with theirs."""
    prompt_logprobs: int | None = None
    """The same as logprobs for the prompt's tokens, except the first."""
    extra_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of plugins' step extensions, by the extension's name; taken literally, and within the limits of
    core/requests/step_extensions.py."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the completion must have: json, regex, choice, grammar or structural_tag; a mapping with one of
    these keys is accepted too."""

    def __post_init__(self) -> None:
        """Check every field, and store its normal form: tuples, dicts, floats, -1 as 0."""
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 1)
        whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"sampling.min_tokens={shown(self.min_tokens)} exceeds max_tokens={shown(self.max_tokens)}"
            )
        if self.seed is not None:
            whole("seed", self.seed, 0, MAX_SEED)
        whole("n", self.n, 1, MAX_COMPLETIONS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            flag(name, getattr(self, name))
        self._keep("stop", texts("stop", self.stop, MAX_STOPS, MAX_STOP_CHARACTERS))
        self._keep_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        self._check_distribution()
        self._check_tokens()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._keep("extra_args", extra_args("extra_args", self.extra_args))
        self._keep("structured_outputs", StructuredOutputs.of(self.structured_outputs))

    def __repr__(self) -> str:
        """The fields with another value than their default."""
        plain = {one.name: {} if one.default is MISSING else one.default for one in fields(self)}
        told = [f"{name}={getattr(self, name)!r}" for name, value in plain.items() if getattr(self, name) != value]
        return f"SamplingParams({', '.join(told)})"

    def _check_distribution(self) -> None:
        if self.temperature is not None:
            self._keep("temperature", number("temperature", self.temperature, 0))
        if self.top_k is not None:
            self._keep("top_k", min(max(0, whole("top_k", self.top_k, -1)), MAX_TOP_K))
        if self.top_p is not None:
            self._keep("top_p", number("top_p", self.top_p, 0, 1, above=True))
        if self.min_p is not None:
            self._keep("min_p", number("min_p", self.min_p, 0, 1))
        if self.repetition_penalty is not None:
            self._keep("repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0, above=True))
        for name in ("presence_penalty", "frequency_penalty"):
            self._keep(name, number(name, getattr(self, name), -2, 2))

    def _check_tokens(self) -> None:
        self._keep("logit_bias", biases("logit_bias", self.logit_bias))
        self._keep("bad_words", words("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            self._keep_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise RequestError("sampling.allowed_token_ids=[] allows no token; null allows all")

    def _keep_ids(self, name: str, most: int) -> None:
        self._keep(name, token_ids(name, getattr(self, name), most))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _with(self, **checked: Any) -> SamplingParams:
        """A copy with other values, which are not checked: checking all again would cost each of n completions."""
        other = object.__new__(type(self))
        vars(other).update({**vars(self), **checked})
        for name in ("processed_fields", "_resolved"):
            vars(other).pop(name, None)
        return other

    def resolved(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """A copy whose None fields are set from `defaults`, else NEUTRAL; cached, as requests share parameters."""
        kept: tuple[Mapping[str, Any], SamplingParams] | None = vars(self).get("_resolved")
        if kept is not None and kept[0] is defaults:
            return kept[1]
        unset = {name: defaults.get(name, value) for name, value in NEUTRAL.items() if getattr(self, name) is None}
        if not unset:
            return self
        vars(self)["_resolved"] = defaults, (resolved := self._with(**unset))
        return resolved

    def each(self) -> list[SamplingParams]:
        """The parameters of each of the n completions, as requests of their own; the first alone scores the prompt."""
        if self.n == 1:
            return [self]
        seeds = [self.seed, *(None if self.seed is None else derived_seed(self.seed, i) for i in range(1, self.n))]
        scores = [self.prompt_logprobs, *[None] * (self.n - 1)]
        pairs = zip(seeds, scores, strict=True)
        return [self._with(n=1, seed=one, prompt_logprobs=num, stop_strings=self.stop_strings) for one, num in pairs]

    @cached_property
    def stop_strings(self) -> StopStrings:
        """The search automaton of `stop`; the first access takes 2 us a character."""
        return StopStrings(self.stop)

    def num_tokens_in(self, room: int) -> int:
        """Most tokens to generate if there is room for `room` tokens."""
        return room if self.max_tokens is None else min(self.max_tokens, room)

    @cached_property
    def processed_fields(self) -> tuple[str, ...]:
        """The fields that need a step extension: their values are neither None nor neutral."""
        return tuple(name for name, neutral in PROCESSED.items() if getattr(self, name) not in (None, neutral))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, as it comes from the configuration and from JSON requests.

        Raises: RequestError for an unknown key, with the most similar one.
        """
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                name = shown_key(key)
                hint = near_miss(name, known, prefix="sampling")
                raise RequestError(f"unknown key 'sampling.{name}'.{hint} Available: {', '.join(known)}")
        return cls(**values)


PROCESSED: Mapping[str, Any] = {
    **{name: value for name, value in NEUTRAL.items() if name != "temperature"},
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": (),
}
"""Fields that step extensions apply, with the values that change nothing."""


NOT_SAMPLED = SamplingParams()
"""The parameters of pooled requests; their fields have no meaning."""


def generation_defaults(generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of the fields in NEUTRAL in a generation_config.json; do_sample=false there means temperature 0.

    Raises: RequestError naming the file for a value that is out of range.
    """
    found = {name: generation[name] for name in NEUTRAL if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        checked = SamplingParams(**found)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    return {name: getattr(checked, name) for name in found}
