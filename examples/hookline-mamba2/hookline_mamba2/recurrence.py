"""What a mixer computes over the tokens of a sequence, whose past lies in states that are read and written in place.

Which token is whose is found out on the device, from `StateRows.query_starts_B1`: a captured step has no lengths on the
host. Legend: T tokens, B requests of the step, R rows of states, C channels, W width of the convolution, P = W - 1 past
inputs; of the recurrence H heads, P head dim, S state size, L tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import StateRows

BLOCK = 64
"""Tokens of prompts that are computed at a time, in products of (L, L)."""


def short_convolution(
    x_TC: Tensor, weight_C1W: Tensor, bias_C: Tensor | None, past: Sequence[Tensor], states: StateRows
) -> Tensor:
    """silu(bias + sum of weight * x over the last W tokens), each channel by itself: (T, C) -> (T, C).

    past: (R, some of the channels, P) each, all channels together: the inputs before the step's, the oldest first.
    """
    starts_B, ends_B = states.query_starts_B1[:-1].long(), states.query_starts_B1[1:].long()
    num_past = weight_C1W.shape[-1] - 1
    back_P = torch.arange(-num_past, 0, device=x_TC.device)
    kept_BCP = torch.cat([tensor[states.rows_B] for tensor in past], dim=1)

    def before(tokens_N: Tensor, request_N: Tensor) -> Tensor:
        """The inputs of the P tokens before each of these tokens, (N, C, P): of this step, or else kept ones."""
        tokens_NP = tokens_N.unsqueeze(1) + back_P
        age_NP = tokens_NP - starts_B[request_N].unsqueeze(1)
        of_step_NCP = x_TC[tokens_NP.clamp(0, len(x_TC) - 1)].transpose(1, 2)
        place_NCP = (age_NP.clamp(max=-1) + num_past).unsqueeze(1).expand_as(of_step_NCP)
        return torch.where((age_NP >= 0).unsqueeze(1), of_step_NCP, kept_BCP[request_N].gather(2, place_NCP))

    tokens_T = torch.arange(len(x_TC), device=x_TC.device)
    seen_TCW = torch.cat([before(tokens_T, requests_of(tokens_T, states)), x_TC.unsqueeze(-1)], dim=-1)
    out_TC = functional.conv1d(seen_TCW, weight_C1W, bias_C, groups=len(weight_C1W)).squeeze(-1)
    next_BCP = before(ends_B, torch.arange(len(ends_B), device=x_TC.device))
    for tensor, kept in zip(past, next_BCP.split([tensor.shape[1] for tensor in past], dim=1), strict=True):
        tensor.index_copy_(0, states.rows_B, kept)
    return functional.silu(out_TC)


def recurrence(
    x_THP: Tensor, decay_TH: Tensor, b_THS: Tensor, c_THS: Tensor, state_RHPS: Tensor, states: StateRows
) -> Tensor:
    """For each token in order, of a request's state S: S = exp(decay) S + x b', and the result is S c: (T, H, P)."""
    num, outputs = states.num_decodes, []
    if num:
        rows_B = states.rows_B[:num]
        added_BHPS = x_THP[:num].unsqueeze(-1) * b_THS[:num].unsqueeze(-2)
        state_BHPS = state_RHPS[rows_B] * decay_TH[:num].exp()[..., None, None] + added_BHPS
        state_RHPS.index_copy_(0, rows_B, state_BHPS)
        outputs.append((state_BHPS * c_THS[:num].unsqueeze(-2)).sum(-1))
    for start in range(num, len(x_THP), BLOCK):
        stop = min(start + BLOCK, len(x_THP))
        request_L = requests_of(torch.arange(start, stop, device=x_THP.device), states) - num
        of_block = (tensor[start:stop] for tensor in (x_THP, decay_TH, b_THS, c_THS))
        outputs.append(_block(*of_block, state_RHPS, states.rows_B[num:], request_L))
    return torch.cat(outputs)


def requests_of(tokens_N: Tensor, states: StateRows) -> Tensor:
    """Which of the step's requests each of these tokens is of, (N,) int64."""
    return torch.searchsorted(states.query_starts_B1[1:].long(), tokens_N, right=True)


def _block(
    x_LHP: Tensor,
    decay_LH: Tensor,
    b_LHS: Tensor,
    c_LHS: Tensor,
    state_RHPS: Tensor,
    rows_B: Tensor,
    request_L: Tensor,
) -> Tensor:
    """`recurrence` of tokens of one or more prompts: what they give each other, and what their states give them."""
    state_BHPS = state_RHPS[rows_B]
    is_same_LL = request_L.unsqueeze(1) == request_L
    is_seen_LL = is_same_LL.tril()
    since_LH = is_seen_LL.float() @ decay_LH  # from its request's first token in the block to this one
    between_LLH = (since_LH.unsqueeze(1) - since_LH).masked_fill(~is_seen_LL.unsqueeze(-1), -torch.inf)
    weight_LLH = torch.einsum("lhs,khs->lkh", c_LHS, b_LHS) * between_LLH.exp()
    y_LHP = torch.einsum("lkh,khp->lhp", weight_LLH, x_LHP)
    y_LHP += torch.einsum("lhs,lhps->lhp", c_LHS * since_LH.exp().unsqueeze(-1), state_BHPS[request_L])
    is_of_BL = (torch.arange(len(rows_B), device=rows_B.device).unsqueeze(1) == request_L).float()
    left_LH = is_same_LL.triu(1).float() @ decay_LH  # from the token after this one to its request's last in the block
    added_LHPS = (x_LHP * left_LH.exp().unsqueeze(-1)).unsqueeze(-1) * b_LHS.unsqueeze(-2)
    kept_BHPS = state_BHPS * (is_of_BL @ decay_LH).exp()[..., None, None]
    state_RHPS.index_copy_(0, rows_B, kept_BHPS + torch.einsum("bl,lhps->bhps", is_of_BL, added_LHPS))
    return y_LHP
