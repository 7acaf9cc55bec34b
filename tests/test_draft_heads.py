"""Drafters with a head: it computes what plain torch does, and no answer changes. Legend: as in tests/draft_heads.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.contracts import ComputedRow, DraftCounts, DrafterSpec, DraftRow
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.outputs import RequestOutput
from hookline.plugins.drafters import MtpConfig
from hookline.plugins.drafters.heads import HeadDrafter
from hookline.plugins.drafters.mtp import Mtp
from tests.draft_heads import rms, save_nextn, target_of
from tests.small_models import CONFIGS

NEXTN = {**CONFIGS["deepseek_v3"], "num_hidden_layers": 2, "mlp_bias": False}
GLM = {**CONFIGS["glm4_moe_lite"], "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}


def drafter_of(cls: Any, config: Any, model: str, folder: Path, drafter: Any) -> HeadDrafter:
    target = target_of(model, folder, drafter)
    return cls(config, DrafterSpec(target.spec.vocab_size, 4, 128, target=target))  # type: ignore[no-any-return]


def observed_in_parts(drafter: HeadDrafter, tokens: list[int], streams: Mapping[int, np.ndarray[Any, Any]]) -> None:
    """Show a request's hidden states in chunks of several sizes, one of them twice, beside another request."""
    known = np.array(tokens, dtype=np.int32)
    other = ComputedRow(7, known[:9], 0, {layer: one[:8] for layer, one in streams.items()})
    for start, end in ((0, 5), (5, 6), (3, 6), (6, len(tokens) - 1)):
        row = ComputedRow(3, known, start, {layer: one[start:end] for layer, one in streams.items()})
        drafter.observe([other, row] if start == 5 else [row])


TOKENS = [5, 17, 40, 3, 22, 9, 9, 61, 80, 12, 35, 2, 71, 70, 8]


def check_drafts(
    drafter: HeadDrafter,
    streams: Mapping[int, np.ndarray[Any, Any]],
    combined_TH: Tensor,
    entries: Callable[[Tensor, Tensor], Tensor],
    best: Callable[[Tensor], int],
) -> None:
    """Hold a drafter against plain torch: the hidden state of its last entry, and three drafts, each of the one before.

    combined_TH: what entries are made of; entries: all of them at once; best: the token of an entry's hidden state.
    """
    observed_in_parts(drafter, TOKENS, streams)
    expected: list[int] = []
    with torch.no_grad():
        first_TH = entries(torch.tensor(TOKENS[1:]), combined_TH)
        out_TH, own_TH = first_TH, combined_TH
        for _ in range(3):
            expected.append(best(out_TH[-1]))
            own_TH = torch.cat([own_TH, out_TH[-1:]])
            out_TH = entries(torch.tensor([*TOKENS[1:], *expected]), own_TH)
    row = DraftRow(3, np.array(TOKENS, dtype=np.int32), 4, 3, SamplingParams(temperature=0.0))
    assert drafter.propose(row) == expected == drafter.propose(row)
    torch.testing.assert_close(drafter.hidden_of(3), first_TH[-1], rtol=1e-3, atol=1e-4)
    assert not drafter.propose(DraftRow(4, row.tokens, 4, 3)), "it saw nothing of this request"
    drafter.forget(3)
    assert not drafter.propose(row)


@pytest.mark.parametrize("config", [NEXTN, GLM], ids=["deepseek_v3", "glm4_moe_lite"])
def test_the_layer_behind_the_last_one_drafts_what_plain_torch_computes(config: dict[str, Any], tmp_path: Path) -> None:
    weights, entries = save_nextn(config, tmp_path)
    stream_TD = torch.randn(len(TOKENS) - 1, config["hidden_size"])
    combined_TD = rms(stream_TD, weights["model.norm.weight"], config.get("rms_norm_eps", 1e-6))
    drafter = drafter_of(Mtp, MtpConfig(k=3), "deepseek", tmp_path, "mtp")
    check_drafts(
        drafter,
        {1: stream_TD.numpy()},
        combined_TD,
        entries,
        lambda x_D: int((weights["lm_head.weight"] @ x_D).argmax()),
    )
