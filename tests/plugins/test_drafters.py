"""The drafters that ship, against their conformance suite and one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from hookline.core.contracts import DrafterSpec, DraftRow
from hookline.core.testing.drafter_suite import DrafterSuite
from hookline.plugins.drafters import DraftModelConfig, Eagle3Config, LookupConfig, MtpConfig, SyntheticConfig
from hookline.plugins.drafters.draft_model import DraftModel
from hookline.plugins.drafters.eagle3 import Eagle3
from hookline.plugins.drafters.lookup import Ngram, Suffix
from hookline.plugins.drafters.mtp import Mtp
from hookline.plugins.drafters.synthetic import Synthetic
from tests.draft_heads import eagle_config, eagle_weights, save_nextn, save_weights, target_of
from tests.small_models import CONFIGS, save_checkpoint

SPEC = DrafterSpec(100, 4, 256)


class TestNgram(DrafterSuite):
    copies = True

    def make(self, spec: DrafterSpec) -> Ngram:
        return Ngram(LookupConfig(), spec)


class TestSuffix(DrafterSuite):
    copies = True

    def make(self, spec: DrafterSpec) -> Suffix:
        return Suffix(LookupConfig(), spec)


class TestSynthetic(DrafterSuite):
    def make(self, spec: DrafterSpec) -> Synthetic:
        return Synthetic(SyntheticConfig(), spec)


@pytest.mark.slow
class TestDraftModel(DrafterSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        self.folder = tmp_path_factory.mktemp("llama")
        save_checkpoint({**CONFIGS["llama"], "vocab_size": self.vocab_size}, self.folder)
        self.drafters: list[DraftModel] = []
        yield
        for drafter in self.drafters:
            drafter.close()

    def make(self, spec: DrafterSpec) -> DraftModel:
        self.drafters.append(DraftModel(DraftModelConfig(str(self.folder), cpu_cache_gib=0.01), spec))
        return self.drafters[-1]


class TestMtp(DrafterSuite):
    layers = (1,)
    hidden_size = 36

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _target(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("nextn")
        sizes = {"num_hidden_layers": 2, "vocab_size": cls.vocab_size, "max_position_embeddings": 300}
        save_nextn({**CONFIGS["deepseek_v3"], **sizes}, folder)
        cls.target = target_of("deepseek", folder, "mtp")

    def make(self, spec: DrafterSpec) -> Mtp:
        return Mtp(MtpConfig(), replace(spec, target=self.target))


class TestEagle3(DrafterSuite):
    layers = (0, 1, 2)
    hidden_size = 32

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _target(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("eagle3")
        sizes = {"num_hidden_layers": 3, "vocab_size": cls.vocab_size, "max_position_embeddings": 300}
        save_checkpoint({**CONFIGS["llama"], **sizes}, folder / "model")
        config = eagle_config({**CONFIGS["llama"], **sizes}, num_key_value_heads=2)
        save_weights(config, eagle_weights(config, cls.hidden_size), folder / "head")
        cls.config = Eagle3Config(str(folder / "head"))
        cls.target = target_of("llama", folder / "model", {"name": "eagle3", "checkpoint": cls.config.checkpoint})

    def make(self, spec: DrafterSpec) -> Eagle3:
        return Eagle3(self.config, replace(spec, target=self.target))


def _row(tokens: list[int], num_drafts: int = 4) -> DraftRow:
    return DraftRow(0, np.array(tokens, dtype=np.int32), len(tokens), num_drafts)


def test_ngram_takes_the_latest_place_of_the_longest_match() -> None:
    drafter = Ngram(LookupConfig(), SPEC)
    assert drafter.propose(_row([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3])) == [4, 9, 2, 3]
    assert drafter.propose(_row([2, 3, 4, 9, 2, 3, 5, 8, 7, 2, 3])) == [5, 8, 7, 2]


def test_suffix_takes_the_most_frequent_continuation_token_by_token() -> None:
    drafter = Suffix(LookupConfig(), SPEC)
    assert drafter.propose(_row([2, 3, 4, 5, 2, 3, 4, 6, 2, 3, 7, 9, 2, 3], 2)) == [4, 6]


def test_suffix_goes_on_with_its_own_drafts_where_a_period_is_short() -> None:
    assert Suffix(LookupConfig(), SPEC).propose(_row([1, 2, 1, 2])) == [1, 2, 1, 2]
    assert Ngram(LookupConfig(), SPEC).propose(_row([1, 2, 1, 2])) == [1, 2]


def _continued(tokens: list[int], num_drafts: int, fewest: int, most: int) -> tuple[list[int], list[int]]:
    """What Ngram and Suffix propose, found place by place."""
    lengths = {}
    for place in range(len(tokens) - 1):
        end = range(min(most, place + 1))
        lengths[place] = next((at for at in end if tokens[place - at] != tokens[-1 - at]), len(end))
    longest = max(lengths.values(), default=0)
    places = [place for place, length in lengths.items() if length == longest >= fewest]
    if not places:
        return [], []
    latest, known = tokens[places[-1] + 1 :][:num_drafts], list(tokens)
    for at in range(1, num_drafts + 1):
        following = [known[place + at] for place in places]
        counts = Counter(following)
        known.append(next(one for one in reversed(following) if counts[one] == max(counts.values())))
        places = [place for place in places if known[place + at] == known[-1]]
    return latest, known[len(tokens) :]


def test_drafts_are_those_found_place_by_place() -> None:
    chosen = Random(0)
    for _ in range(1000):
        words = [[chosen.randrange(chosen.choice([2, 4, 40])) for _ in range(chosen.randrange(1, 12))] for _ in "abc"]
        tokens = [token for _ in range(chosen.randrange(1, 9)) for token in chosen.choice(words)]
        num_drafts, fewest = chosen.randrange(1, 7), chosen.randrange(1, 4)
        config = LookupConfig(num_drafts, fewest, chosen.randrange(fewest, 9))
        found = tuple(list(cls(config, SPEC).propose(_row(tokens, num_drafts))) for cls in (Ngram, Suffix))
        assert found == _continued(tokens, num_drafts, fewest, config.max_match), (tokens, config)


@pytest.mark.parametrize("cls", [Ngram, Suffix])
def test_a_match_that_is_too_short_gives_no_drafts(cls: type[Ngram] | type[Suffix]) -> None:
    assert not len(cls(LookupConfig(min_match=3), SPEC).propose(_row([1, 2, 3, 4, 2, 3])))
