"""Which head a checkpoint stores where its config.json ties the head to the embedding: by rank, by chunk, by source."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hookline.core.checkpoint import ties
from hookline.core.checkpoint.load import load_source
from hookline.core.checkpoint.ties import unlike_head, untied, with_either_stored
from hookline.core.contracts import WeightTarget
from hookline.core.distributed.ranks import LocalRanks
from tests.core.checkpoint.test_source import Source

ALONE = LocalRanks()
EMBEDDING = torch.arange(40.0).view(10, 4)


def targets() -> dict[str, WeightTarget]:
    weight = torch.zeros(12, 4)  # two rows of padding
    return {
        "embed": WeightTarget.whole(weight[:10]),
        "head": WeightTarget.tied(weight),
        "other": WeightTarget.ignored(),
    }


def unlike(head: Tensor, ranks: LocalRanks = ALONE) -> str | None:
    source = Source({"embed": EMBEDDING, "head": head})
    return unlike_head(targets(), source.shapes(), source, ranks)


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_a_difference_in_any_chunk_is_found(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(ties, "_CHUNK_BYTES", rows * 16)
    assert unlike(EMBEDDING.clone()) is None
    for row in range(10):
        head = EMBEDDING.clone()
        head[row, 1] += 1
        assert unlike(head) == "head"


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_every_row_is_compared_by_one_of_the_ranks(size: int) -> None:
    for row in range(10):
        head = EMBEDDING.clone()
        head[row] = -1
        assert [unlike(head, LocalRanks(rank, size)) for rank in range(size)].count("head") == 1


def test_values_are_compared_in_the_dtype_that_they_are_loaded_in() -> None:
    assert unlike(EMBEDDING.double()) is None
    assert unlike(EMBEDDING.double() * (1 + 1e-12)) is None
    assert unlike(EMBEDDING + 1e-3) == "head"


def test_a_head_that_is_not_a_number_is_no_copy() -> None:
    assert unlike(EMBEDDING * torch.nan) == "head"


def test_a_head_alone_fills_the_embedding_and_its_padding_stays_zero() -> None:
    found, source = targets(), Source({"head": EMBEDDING})
    load_source("x", source, with_either_stored(found, source.shapes()))
    weight = found["head"].tied_to
    assert weight is not None
    assert torch.equal(weight[:10], EMBEDDING) and not weight[10:].any() and source.reads == ["head"]


def test_a_rank_whose_rows_are_all_padding_knows_the_tie() -> None:
    weight = torch.zeros(4, 4)
    padding = {"embed": WeightTarget(weight[:0], (10, 4), 0, 10, 10), "head": WeightTarget.tied(weight)}
    assert with_either_stored(padding, {"head": None})["embed"].view is None


def test_a_stage_without_the_embedding_finds_nothing() -> None:
    stage = {"embed": WeightTarget.ignored(), "head": WeightTarget.tied(torch.empty(0, 4))}
    source = Source({"embed": EMBEDDING, "head": -EMBEDDING})
    assert unlike_head(stage, source.shapes(), source, ALONE) is None
    assert with_either_stored(stage, {"head": None})["head"].view is None


def test_what_was_given_to_be_untied_stays_as_it_is() -> None:
    config = {"tie_word_embeddings": True, "hidden_size": 4}
    assert untied(config) == {"tie_word_embeddings": False, "hidden_size": 4}
    assert config["tie_word_embeddings"]
