"""What a request says of itself beside its prompt and its sampling: whose it is, how urgent, and what it may share.

Checked once, on arrival. What "urgent" means is up to the scheduler.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from hookline.core.errors import RequestError, shown, shown_key
from hookline.core.sampling_params import MAX_WHOLE, as_float
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
NOT_SAID: Mapping[str, Any] = {"priority": 0, "tags": None, "deadline_s": None, "cache_salt": None}
"""Names of these fields, the same wherever a request comes from, with the values they have if they are not given."""
INFO_KEYS = tuple(NOT_SAID)


@dataclass(frozen=True)
class RequestInfo:
    """How urgent a request is, whose it is, when it should be done, and whose cached prefixes it may use.

    Made by `validated`; the plain constructor trusts its arguments.
    """

    priority: int = 0
    """Lower is more urgent. Only some schedulers use it."""
    tags: Mapping[str, str] = field(default_factory=lambda: NO_TAGS, hash=False)
    """The caller's labels, e.g. {"tenant": "acme"}: for schedulers, observers and reports. Read-only."""
    deadline_s: float | None = None
    """Seconds after its arrival by which it should be done. Only some schedulers use it; timeout_s ends a request."""
    cache_salt: str | None = None
    """Requests find each other's blocks in the prefix cache only if their salts are equal."""
    trace: Mapping[str, str] = field(default_factory=lambda: NO_TAGS, hash=False)
    """For observers that trace: the headers of the caller's trace, e.g. `traceparent`, and attributes of the request's
    own span, which begin with `gen_ai.`. Read-only."""

    @classmethod
    def validated(
        cls,
        *,
        priority: Any = 0,
        tags: Any = None,
        deadline_s: Any = None,
        cache_salt: Any = None,
        trace: Any = None,
        tag_keys: Collection[str] | None = None,
    ) -> Self:
        """Check what a caller gave. None counts as not given. tag_keys: the keys that tags may have; None: any.

        Raises: RequestError in one line, with the value and the limit.
        """
        if not _is_int64(priority):
            raise RequestError(f"priority={shown(priority)} must be a whole number; lower is more urgent")
        if deadline_s is not None and not 0 < as_float(deadline_s) < math.inf:
            raise RequestError(f"deadline_s={shown(deadline_s)} must be a finite number of seconds above 0, or None")
        if cache_salt is not None:
            _check_salt(cache_salt)
        deadline_s = None if deadline_s is None else float(deadline_s)
        tags = NO_TAGS if tags is None else _checked_tags(tags, tag_keys)
        return cls(priority, tags, deadline_s, cache_salt, NO_TAGS if trace is None else _checked_trace(trace))

    @classmethod
    def of_valid(cls, given: Mapping[str, Any], tag_keys: Collection[str] | None = None) -> Self:
        """Of what a refused request gave, the values that are valid."""
        info = cls()
        for key, value in given.items():
            with suppress(RequestError):
                info = replace(info, **{key: getattr(cls.validated(**{key: value}, tag_keys=tag_keys), key)})
        return info

    def as_options(self) -> dict[str, Any]:
        """The fields as a mapping with the names of INFO_KEYS."""
        return {key: getattr(self, key) for key in INFO_KEYS}

    @property
    def prefix_root(self) -> int:
        """What stands before the first block of the request's prefix: equal for equal salts, 0 without one.

        Above 2**128, so no serial of a block's content; 128 bits of a cryptographic hash, so no other salt's either.
        """
        if self.cache_salt is None:
            return 0
        digest = hashlib.blake2b(self.cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return (1 << 128) + int.from_bytes(digest, "little")


PLAIN = RequestInfo()
"""The info of a request that gives none of the fields."""


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
            raise RequestError(f"unknown tag '{key}'.{hint} engine.tag_keys allows: {available}")
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_TAG_CHARACTERS or not value.isprintable():
            raise RequestError(
                f"tags.{key}={shown(value)} must be a text of 1 to {MAX_TAG_CHARACTERS} printable characters"
            )
    return MappingProxyType(dict(tags))


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
