"""Counts the tokens that requests were served, by the value of a tag; only for tags that a scheduler policy reads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from hookline.core.contracts import MAX_SERVED_VALUES, ServedTokens
from hookline.core.requests.request import Request

NOTHING = ServedTokens()
UNTAGGED = ""
"""Stands for requests without the tag, whose values have at least one character."""


class ServedCounts:
    """Tokens served by one engine, by tag and value."""

    def __init__(self) -> None:
        self._by_key: dict[str, OrderedDict[str, ServedTokens]] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether a policy asked for any tag."""
        return bool(self._by_key)

    def of(self, key: str) -> Mapping[str, ServedTokens]:
        """See SchedulerView.served_tokens; live, and not to be changed."""
        return MappingProxyType(self._by_key.setdefault(key, OrderedDict()))

    def add(self, prompts: Iterable[tuple[Request, int]], generated: Sequence[Request]) -> None:
        """Count a committed step's tokens: new ones of prompts, and one for each request that keeps a drawn one."""
        prompts = list(prompts)
        for key, served in self._by_key.items():
            num_prompt: Counter[str] = Counter()
            for request, num_tokens in prompts:
                num_prompt[request.tags.get(key, UNTAGGED)] += num_tokens
            num_generated = Counter([request.tags.get(key, UNTAGGED) for request in generated])
            for value in num_prompt | num_generated:
                before = served.pop(value, NOTHING)
                served[value] = ServedTokens(before.prompt + num_prompt[value], before.generated + num_generated[value])
            while len(served) > MAX_SERVED_VALUES:
                served.popitem(last=False)
