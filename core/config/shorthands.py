"""Short forms of arguments, written out as the keys that they stand for before Hydra reads them.

A positional argument is the value of one key of its command: `hookline serve Qwen/Qwen3-0.6B`, `hookline run "hello"`.
`model=` takes a checkpoint too, which is told from the name of a model or a preset by a slash in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hookline.core.errors import ConfigError, shown

CHECKPOINT = "model.checkpoint"
_KEY = re.compile(r"[+~]{0,2}[\w.@:/\[\]-]+")


def is_positional(argument: str) -> bool:
    """Whether an argument, which is no flag, has no key. A text may contain an = behind words that cannot be a key."""
    key, equals, _ = argument.partition("=")
    return not argument.startswith("~") and not (equals and _KEY.fullmatch(key))


def write_out(pairs: Sequence[str], positional: str | None, keys: Sequence[str]) -> list[str]:
    """The arguments with keys in place of short forms. positional: key of a positional argument; None: refused.

    keys: full keys of the command: an argument that is one lacks its value, and is left for Hydra to refuse.
    Raises: ConfigError for several positional arguments, for one beside its key, or for a key with spaces around its =.
    """
    _refuse_spaces(pairs, positional, keys)
    values = [one for one in pairs if positional is not None and is_positional(one) and one not in keys]
    if len(values) > 1:
        first, second = map(shown, values[:2])
        raise ConfigError(f"{first} and {second} have no key; {positional} takes one, {_meant(values, positional)}")
    given = [one for one in pairs if one not in values]
    for value in values:
        set_ = {one.partition("=")[0] for one in given}
        for key in {positional, CHECKPOINT if positional == "model" else positional} & set_:
            raise ConfigError(f"{key} is given twice, as {shown(value)} and by its key; leave one out")
        given.append(f"{positional}={value}")
    return [_with_checkpoint(one) for one in given]


def _meant(values: Sequence[str], positional: str | None) -> str:
    """The hint for several positional arguments, of which the first may be a checkpoint."""
    if positional != "model" and "/" in values[0] and " " not in values[0]:
        return f"and a checkpoint has a key: {shlex.join((f'{CHECKPOINT}={values[0]}', ' '.join(values[1:])))}"
    return "with quotes around all its words"


def _with_checkpoint(argument: str) -> str:
    key, _, value = argument.partition("=")
    swept = value.split(",")
    return f"{CHECKPOINT}={value}" if key == "model" and all("/" in one for one in swept) else argument


def _refuse_spaces(pairs: Sequence[str], positional: str | None, keys: Sequence[str]) -> None:
    """Refuse `key = value`, as one argument or as several. A text may look so, too, which the error says."""
    for place, argument in enumerate(pairs):
        key, equals, value = argument.partition("=")
        apart = not key and place > 0 and pairs[place - 1] in keys
        if not equals or not (apart or (key != key.rstrip() and key.rstrip() in keys)):
            continue
        key = pairs[place - 1] if apart else key.rstrip()
        value = value.strip() or (pairs[place + 1] if place + 1 < len(pairs) else "VALUE")
        text = "" if apart or positional is None else f", or {shlex.quote(f'{positional}={argument}')} if it is a text"
        written = shlex.quote(f"{key}={value}")
        raise ConfigError(f"{shown(key)} is a key, which has no spaces around its =; write {written}{text}")
