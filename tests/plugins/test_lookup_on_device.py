"""Look-ups on the device find what those on the host find: in plain torch, and as a Triton kernel."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from hookline.core.contracts import DrafterSpec, DraftRow
from hookline.plugins.drafters import LookupConfig
from hookline.plugins.drafters import lookup_on_device as on_device
from hookline.plugins.drafters.lookup import Ngram, Suffix

SPEC = DrafterSpec(100, 4, 256)
ROWS, LONGEST = 6, 100


def _texts(chosen: Random) -> list[list[int]]:
    """Texts of words that come again, one of a single token among them."""
    texts = [[chosen.randrange(9)]]
    while len(texts) < ROWS:
        words = [[chosen.randrange(chosen.choice([4, 40])) for _ in range(chosen.randrange(1, 12))] for _ in "abcd"]
        text = [token for _ in range(chosen.randrange(1, 12)) for token in chosen.choice(words)]
        texts.append(text[:LONGEST])
    return texts


def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up by the kernel, a few places at a time."""
    monkeypatch.setattr(on_device, "BLOCK", 16)
    monkeypatch.setattr(on_device, "look_up_plainly", on_device.launch_look_up)


@pytest.mark.parametrize("is_kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("drafter_class", [Ngram, Suffix])
def test_the_device_drafts_what_the_host_does(
    drafter_class: type[Ngram] | type[Suffix], is_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_kernel:
        _kernel(monkeypatch)
    chosen, num_found = Random(0), 0
    for _ in range(8 if is_kernel else 100):
        texts, num_drafts, fewest = _texts(chosen), chosen.randrange(1, 7), chosen.randrange(1, 4)
        drafter = drafter_class(LookupConfig(num_drafts, fewest, chosen.randrange(fewest, 9)), SPEC)
        tokens_RL = torch.full((ROWS, LONGEST + 1), 7, dtype=torch.int32)  # behind the texts are other tokens
        for row, text in enumerate(texts):
            tokens_RL[row, : len(text)] = torch.tensor(text)
        rows = [chosen.randrange(ROWS) for _ in range(4)]
        lengths_B = torch.tensor([len(texts[row]) for row in rows], dtype=torch.int32)
        drafts_BK = drafter.propose_on_device(tokens_RL, torch.tensor(rows), lengths_B, num_drafts)
        assert drafts_BK.dtype == torch.int64 and drafts_BK.shape == (4, num_drafts)
        for row, drafts in zip(rows, drafts_BK.tolist(), strict=True):
            text = np.array(texts[row], dtype=np.int32)
            if len(drafter._places(text)) <= on_device.MOST_PLACES:
                found = list(drafter.propose(DraftRow(0, text, 1, num_drafts)))
                assert drafts == found + [-1] * (num_drafts - len(found))
                num_found += len(found) > 0
    assert num_found > (8 if is_kernel else 100)


def test_the_latest_places_count_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [1, 2] * 20 + [1, 3] * on_device.MOST_PLACES + [1]
    tokens_RL, rows_B = torch.tensor([text], dtype=torch.int32), torch.tensor([0])
    lengths_B, matches = torch.tensor([len(text)]), range(1, 2)
    plain_BK = on_device.look_up(tokens_RL, rows_B, lengths_B, 2, matches=matches, counts=True)
    _kernel(monkeypatch)
    assert plain_BK.tolist() == [[3, 1]]
    assert on_device.look_up(tokens_RL, rows_B, lengths_B, 2, matches=matches, counts=True).tolist() == [[3, 1]]
