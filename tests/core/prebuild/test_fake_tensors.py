"""Fake tensors have the sizes, the strides, the type and the place of the outcomes that torch computes."""

from __future__ import annotations

import pytest
import torch

from hookline.core.prebuild.fake_tensors import FakeTensors

OPERATIONS = {
    "add": lambda x, n: x + x,
    "arange": lambda x, n: torch.arange(7, device=x.device),
    "broadcast": lambda x, n: x + x[:, :1],
    "cat": lambda x, n: torch.cat([x, x[1:]]),
    "cumsum": lambda x, n: n.cumsum(0),
    "embedding": lambda x, n: torch.nn.functional.embedding(n, x),
    "empty": lambda x, n: torch.empty(2, 3, dtype=torch.int8, device=x.device),
    "empty_like": lambda x, n: torch.empty_like(x.t(), dtype=torch.float64),
    "expand": lambda x, n: x[:1].expand(5, 6),
    "fill": lambda x, n: x.fill_(1.0),
    "gather": lambda x, n: x.gather(0, n[:, None]),
    "index": lambda x, n: torch.ops.aten.index.Tensor(x, [None, n]),
    "index_select": lambda x, n: x.index_select(0, n),
    "linear": lambda x, n: torch.nn.functional.linear(x[:2], x),
    "list of numbers": lambda x, n: torch.tensor([3, 1]),
    "number": lambda x, n: torch.tensor(4) + 1,
    "of another type": lambda x, n: x + n[:, None],
    "out": lambda x, n: torch.sub(x[:, 1:], x[:, :-1], out=torch.empty(4, 5, device=x.device)),
    "reshape": lambda x, n: x[:, 1:].reshape(-1),
    "select": lambda x, n: x.select(1, 2),
    "sent": lambda x, n: x.to(device="cpu", dtype=torch.float64),
    "sent nowhere": lambda x, n: x.to(device="cpu", dtype=torch.float32),
    "slice": lambda x, n: torch.ops.aten.slice.Tensor(x, 1, 1, 6, 2),
    "split": lambda x, n: torch.cat(x.split([1, 3])[1:]),
    "squeeze": lambda x, n: x[:1].squeeze(0),
    "subtract": lambda x, n: n - 1,
    "to": lambda x, n: x.to(torch.bfloat16),
    "unbind": lambda x, n: x.unbind(1)[2],
    "unsqueeze": lambda x, n: x.unsqueeze(-1),
    "view": lambda x, n: x.view(2, 12),
    "zeros": lambda x, n: torch.zeros(3, 2, device=x.device),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_outcome_is_like_that_of_real_tensors(name):
    def outcome():
        x, indices = torch.ones(4, 6), torch.tensor([0, 3, 1, 2])
        return (found := OPERATIONS[name](x, indices)), found is x

    with torch.inference_mode():
        real, is_given = outcome()
        with FakeTensors():
            fake, is_given_too = outcome()
    for one in ("shape", "stride", "storage_offset", "dtype", "device"):
        ours, torchs = getattr(fake, one), getattr(real, one)
        assert (ours() == torchs()) if callable(ours) else (ours == torchs), one
    assert is_given_too == is_given


def test_tensors_share_memory_where_real_ones_do_and_a_single_number_is_known():
    with FakeTensors(), torch.inference_mode():
        x = torch.zeros(4, 6)
        parts = [x[1:], x.reshape(24), x.unbind(0)[1], x.expand(4, 6), x.to(torch.float32)]
        assert {part.untyped_storage()._cdata for part in parts} == {x.untyped_storage()._cdata}
        assert x[:, 1:].reshape(-1).untyped_storage()._cdata != x.untyped_storage()._cdata
        assert torch.tensor(7).item() == 7


def test_a_tensor_is_sent_to_a_card_that_is_not_there_and_what_is_made_of_it_lies_there():
    with FakeTensors(), torch.inference_mode():
        x = torch.empty(3, 4).to(device="cuda:0", dtype=torch.bfloat16)
        assert x.device == torch.device("cuda", 0) and x.dtype == torch.bfloat16
        assert {
            one.device for one in (torch.ops.aten.slice.Tensor(x), x + x, torch.cat([x, x]), torch.empty_like(x))
        } == {x.device}
        assert torch.empty_like(x, device="cpu").device == torch.device("cpu")
        assert x.to(device="cuda:0", dtype=torch.bfloat16) is x and (x + torch.tensor(1)).device == x.device
