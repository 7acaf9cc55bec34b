"""The drafter against Hookline's conformance suite, its choice among places, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hookline_corpus import CorpusConfig
from hookline_corpus.drafter import Corpus
from tokenizers import Tokenizer, models, pre_tokenizers

from hookline.core.contracts import DrafterSpec, DraftRow
from hookline.core.errors import ConfigError
from hookline.core.testing.drafter_suite import DrafterSuite

SPEC = DrafterSpec(vocab_size=97, max_num_seqs=8, max_model_len=256)


def config(folder: Path, tokens: Any, **fields: Any) -> CorpusConfig:
    """That of a text which consists of these token ids, written as numbers."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(200)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "corpus.txt").write_text(" ".join(map(str, tokens)), encoding="utf-8")
    return CorpusConfig(str(folder / "corpus.txt"), str(folder / "tokenizer.json"), **fields)


def row(tokens: list[int], num_drafts: int = 4) -> DraftRow:
    return DraftRow(0, np.array(tokens, dtype=np.int32), 1, num_drafts)


class TestCorpus(DrafterSuite):
    copies = True

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.config = config(tmp_path, (np.arange(40) * 7 % self.vocab_size).tolist())

    def make(self, spec: DrafterSpec) -> Corpus:
        return Corpus(self.config, spec)


def test_the_place_with_the_longest_match_is_taken(tmp_path: Path) -> None:
    drafter = Corpus(config(tmp_path, [9, 2, 3, 4, 5, 8, 2, 3, 4, 6, 7], min_match=2), SPEC)
    assert drafter.propose(row([8, 2, 3, 4])) == [6, 7]
    assert drafter.propose(row([9, 2, 3, 4], 2)) == [5, 8]
    assert drafter.propose(row([1, 2, 3, 4], 1)) == [5]


def test_no_drafts_without_a_match_that_is_long_enough(tmp_path: Path) -> None:
    drafter = Corpus(config(tmp_path, [1, 2, 3, 4, 5]), SPEC)
    assert [len(drafter.propose(row(tokens))) for tokens in ([2, 3], [9, 2, 3], [1, 2, 4], [3, 4, 5])] == [0, 0, 0, 0]
    assert drafter.propose(row([1, 2, 3])) == [4, 5]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"corpus": ""}, r"drafter=corpus needs drafter\.corpus=FILE"),
        ({"tokenizer": ""}, r"drafter=corpus needs drafter\.tokenizer=FILE"),
        ({"corpus": "missing.txt"}, r"drafter\.corpus=missing\.txt cannot be read as text"),
        ({"tokenizer": "missing.json"}, r"drafter\.tokenizer=missing\.json is no tokenizer\.json"),
        ({"max_match": 1}, r"drafter\.max_match=1 must be at least 3"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    made = config(tmp_path, [1, 2, 3])
    for name, value in fields.items():
        setattr(made, name, value)
    with pytest.raises(ConfigError, match=told):
        Corpus(made, SPEC)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="makes token 150, and the model knows 97"):
        Corpus(config(tmp_path, [1, 150]), SPEC)
