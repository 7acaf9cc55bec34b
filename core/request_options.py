"""What a request says beside its prompt and its sampling: whose it is, how urgent, how long it may take.

One value from the front end to the engine, which checks it on arrival. What "urgent" means is up to the scheduler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

from hookline.core.errors import RequestError, shown, shown_key
from hookline.core.sampling_params import MAX_WHOLE, SamplingParams, as_float
from hookline.core.util.text import near_miss

MAX_TAGS = 8
MAX_TAG_CHARACTERS = 128
"""Most characters of a tag's value."""
MAX_SALT_CHARACTERS = 256
MAX_TRACE_CHARACTERS = 8192
"""Most characters of each part of a trace: of its baggage, by its own specification."""
TAG_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
NO_TAGS: Mapping[str, str] = MappingProxyType({})
CHAT_TRACE: Mapping[str, str] = MappingProxyType({"gen_ai.operation.name": "chat"})
"""The trace of a prompt that is a conversation, where the caller says nothing of it."""


class OptionKeys(TypedDict, total=False):
    """Keyword arguments that make RequestOptions."""

    priority: int
    tags: Mapping[str, str] | None
    deadline_s: float | None
    cache_salt: str | None
    timeout_s: float | None
    trace: Mapping[str, str] | None


class EachOptionKeys(TypedDict, total=False):
    """Keyword arguments that make the RequestOptions of several prompts: one value for all, or a list with one each."""

    priority: int | Sequence[int]
    tags: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None
    deadline_s: float | Sequence[float | None] | None
    cache_salt: str | Sequence[str | None] | None
    timeout_s: float | Sequence[float | None] | None


@dataclass(frozen=True)
class RequestOptions:
    """How urgent a request is, whose it is, when it should be done or ends, and whose cached prefixes it may use.

    As the caller gave them, until `checked`. None counts as not given.
    """

    priority: int = 0
    """Lower is more urgent. Only some schedulers use it."""
    tags: Mapping[str, str] | None = field(default=None, hash=False)
    """The caller's labels, e.g. {"tenant": "acme"}: for schedulers, observers and reports. Read-only once checked."""
    deadline_s: float | None = None
    """Seconds after its arrival by which it should be done. Only some schedulers use it."""
    cache_salt: str | None = None
    """Requests find each other's blocks in the prefix cache only if their salts are equal."""
    timeout_s: float | None = None
    """Ends the request this many seconds after its arrival, with finish_reason "abort" and the reason."""
    trace: Mapping[str, str] | None = field(default=None, hash=False)
    """For observers that trace: the headers of the caller's trace, e.g. `traceparent`, and attributes of the request's
    own span, which begin with `gen_ai.`. Read-only once checked."""

    def checked(self, tag_keys: Collection[str] | None = None) -> RequestOptions:
        """The options in the form that the engine keeps. tag_keys: the keys that tags may have; None: any.

        Raises: RequestError in one line, with the value and the limit.
        """
        _check_seconds("timeout_s", self.timeout_s)
        if not _is_int64(self.priority):
            raise RequestError(f"priority={shown(self.priority)} must be a whole number; lower is more urgent")
        _check_seconds("deadline_s", self.deadline_s)
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)
        tags = None if self.tags is None else _checked_tags(self.tags, tag_keys) or None
        trace = None if self.trace is None else _checked_trace(self.trace) or None
        deadline_s = None if self.deadline_s is None else float(self.deadline_s)
        return replace(self, tags=tags, deadline_s=deadline_s, trace=trace)

    def limited(self, timeout_s: float | None) -> RequestOptions:
        """The options with the shorter of the request's own time limit and this one; None: no further limit.

        Raises: RequestError if the request's own is no number of seconds.
        """
        _check_seconds("timeout_s", self.timeout_s)
        if timeout_s is None or (self.timeout_s is not None and self.timeout_s <= timeout_s):
            return self
        return replace(self, timeout_s=timeout_s)

    def valid_part(self, tag_keys: Collection[str] | None = None) -> RequestOptions:
        """Of what a refused request gave, the values that are valid."""
        valid = RequestOptions()
        for key, value in self.given().items():
            with suppress(RequestError):
                checked = RequestOptions(**{key: value}).checked(tag_keys)
                valid = replace(valid, **{key: getattr(checked, key)})
        return valid

    def given(self) -> dict[str, Any]:
        """The fields that are not their defaults, by name."""
        named = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        return {name: value for name, (value, default) in named.items() if value is not default}

    @property
    def prefix_root(self) -> int:
        """What stands before the first block of the request's prefix: equal for equal salts, 0 without one.

        Above 2**128, so no serial of a block's content; 128 bits of a cryptographic hash, so no other salt's either.
        """
        if self.cache_salt is None:
            return 0
        import hashlib  # OpenSSL, 8 ms that only salted requests need

        digest = hashlib.blake2b(self.cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return (1 << 128) + int.from_bytes(digest, "little")


def options_each(count: int, **given: Unpack[EachOptionKeys]) -> list[RequestOptions]:
    """The options of each of `count` prompts. A list, which is no text, has one value for each prompt.

    Raises: RequestError for a list of another length; TypeError for an option that there is not.
    """
    columns = {name: _one_each(name, value, count) for name, value in given.items()}
    return [options_of(**{name: values[index] for name, values in columns.items()}) for index in range(count)]


def options_of(**given: Unpack[OptionKeys]) -> RequestOptions:
    """The options of a call in Python. Raises: TypeError for one that there is not, with what was meant."""
    names = [one.name for one in fields(RequestOptions)]
    for name in given.keys() - names:
        if name in (one.name for one in fields(SamplingParams)):
            raise TypeError(f"{name} is a sampling parameter; pass SamplingParams({name}=...)")
        raise TypeError(f"unexpected argument '{name}'.{near_miss(name, names)} Available: {', '.join(names)}")
    return RequestOptions(**given)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        return [value] * count
    each = list(value)
    if len(each) != count:
        raise RequestError(f"{name} has {len(each)} values for {count} prompts; pass one, or one for each prompt")
    return each


PLAIN = RequestOptions()
"""The options of a request that gives none."""
LINE_KEYS = ("priority", "tags", "deadline_s", "cache_salt")
"""Options that a line of a file, or a class of a benchmark's load, may give: all but the time limit."""


def check_tag_key(key: object) -> None:
    """Refuse what cannot be a tag's key.

    Raises: RequestError with the key and what it must be.
    """
    if not isinstance(key, str) or not TAG_KEY.fullmatch(key):
        raise RequestError(
            f"tags.{shown_key(key)}: a tag's key is at most 32 characters of a-z, 0-9, '_', '.' and '-', and begins "
            "with a letter"
        )


def _checked_tags(tags: Any, known: Collection[str] | None) -> Mapping[str, str]:
    if not isinstance(tags, Mapping):
        raise RequestError(f"tags={shown(tags)} must be a mapping of keys to texts")
    if len(tags) > MAX_TAGS:
        raise RequestError(f"tags has {len(tags)} keys; at most {MAX_TAGS} are allowed")
    for key, value in tags.items():
        check_tag_key(key)
        if known is not None and key not in known:
            available = ", ".join(known) or "none"
            hint = near_miss(key, known)
            raise RequestError(f"tags.{key} is unknown.{hint} engine.tag_keys allows: {available}")
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_TAG_CHARACTERS or not value.isprintable():
            raise RequestError(
                f"tags.{key}={shown(value)} must be a text of 1 to {MAX_TAG_CHARACTERS} printable characters"
            )
    return MappingProxyType(dict(tags))


def _check_seconds(name: str, value: Any) -> None:
    if value is not None and not 0 < as_float(value) < math.inf:
        raise RequestError(f"{name}={shown(value)} must be a finite number of seconds above 0, or None")


def _checked_trace(trace: Any) -> Mapping[str, str]:
    pairs = trace.items() if isinstance(trace, Mapping) else [(None, trace)]
    if not all(isinstance(one, str) and len(one) <= MAX_TRACE_CHARACTERS for pair in pairs for one in pair):
        most = f"of at most {MAX_TRACE_CHARACTERS} characters each"
        raise RequestError(f"trace={shown(trace)} must be a mapping of names to texts, {most}")
    return MappingProxyType(dict(trace))


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str) or not salt:
        raise RequestError(f"cache_salt={shown(salt)} must be a text of 1 to {MAX_SALT_CHARACTERS} characters, or None")
    if len(salt) > MAX_SALT_CHARACTERS:  # its value is not shown, as it is likely a secret
        raise RequestError(f"cache_salt has {len(salt)} characters; at most {MAX_SALT_CHARACTERS} are allowed")


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_WHOLE
