"""The drafter: it looks a request's newest tokens up in a text, and proposes what follows there.

The text is read once. A dict names, for each `min_match` tokens in a row, the places behind them: about 200 bytes a
token of the text, and a few microseconds a look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from hookline.core.contracts import Drafter, DrafterSpec, DraftRow
from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from hookline_corpus import CorpusConfig

MAX_PLACES = 32
"""Most places that are kept of equal tokens, the first ones."""


class Corpus(Drafter):
    """See CorpusConfig."""

    def __init__(self, config: CorpusConfig, spec: DrafterSpec) -> None:
        if config.max_match < config.min_match:
            raise ConfigError(f"drafter.max_match={config.max_match} must be at least {config.min_match}")
        self.k, self.adaptive = config.k, config.adaptive
        self._min, self._max = config.min_match, config.max_match
        self.tokens = tokens_of(config)
        if max(self.tokens, default=0) >= spec.vocab_size:
            raise ConfigError(
                f"drafter.tokenizer={config.tokenizer} makes token {max(self.tokens)}, and the model knows "
                f"{spec.vocab_size}; name the tokenizer.json of its checkpoint"
            )
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(self._min, len(self.tokens)):
            places = self._places.setdefault(tuple(self.tokens[end - self._min : end]), [])
            if len(places) < MAX_PLACES:
                places.append(end)

    def propose(self, row: DraftRow) -> Sequence[int]:
        """What follows the place with the longest match; of equally long ones the first."""
        newest: list[int] = row.tokens[-self._max :].tolist()
        places = self._places.get(tuple(newest[-self._min :]))
        if not places:
            return ()
        place = max(places, key=lambda place: self._match(newest, place))
        return self.tokens[place : place + row.num_drafts]

    def _match(self, newest: Sequence[int], place: int) -> int:
        """How many of the newest tokens, from the last one back, stand before a place of the text."""
        length = self._min
        while length < min(len(newest), place) and newest[-1 - length] == self.tokens[place - 1 - length]:
            length += 1
        return length


def tokens_of(config: CorpusConfig) -> list[int]:
    """The token ids of the text. Raises: ConfigError naming the file that cannot be read."""
    for name in ("corpus", "tokenizer"):
        if not getattr(config, name):
            raise ConfigError(f"drafter=corpus needs drafter.{name}=FILE")
    try:
        with open(config.corpus, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"drafter.corpus={config.corpus} cannot be read as text: {error}") from error
    try:
        tokenizer = Tokenizer.from_file(config.tokenizer)
    except Exception as error:  # the library raises no class of its own
        raise ConfigError(f"drafter.tokenizer={config.tokenizer} is no tokenizer.json: {error}") from error
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return tokens
