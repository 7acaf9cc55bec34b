"""What a scheduler sees of a request: `core.contracts.RequestView` over the live one. Knows no more than that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.request import Request


@dataclass(frozen=True, slots=True)
class RequestFacade:
    """It shows, and cannot set."""

    _request: Request = field(repr=False)

    @property
    def id(self) -> int:
        """See RequestView."""
        return self._request.id

    @property
    def arrival_s(self) -> float:
        """See RequestView."""
        return self._request.arrival_s

    @property
    def priority(self) -> int:
        """See RequestView."""
        return self._request.priority

    @property
    def num_prompt_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_output_tokens

    @property
    def max_tokens(self) -> int:
        """See RequestView."""
        return self._request.max_tokens

    @property
    def num_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """See RequestView."""
        return self._request.is_prefilling
