"""The recurrence of a mixer over the tokens of sequences, whose states are read and written in place.

Which token is whose is found out on the device, from `StateRows.query_starts_B1`: a captured step has no lengths on the
host. Legend: T tokens, B requests, R rows of states, H heads, P head dim, S state size, L tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor, einsum

from hookline.core.contracts import StateRows

BLOCK = 64
"""Tokens of prompts that are computed at a time, in products of (L, L)."""


def recurrence(
    x_THP: Tensor, decay_TH: Tensor, b_THS: Tensor, c_THS: Tensor, state_RHPS: Tensor, states: StateRows
) -> Tensor:
    """For each token in order, of a request's state S: S = exp(decay) S + x b', and the result is S c: (T, H, P)."""
    num, outputs = states.num_decodes, []
    if num:
        rows_B, added_BHPS = states.rows_B[:num], einsum("bhp,bhs->bhps", x_THP[:num], b_THS[:num])
        state_BHPS = state_RHPS[rows_B] * decay_TH[:num].exp()[..., None, None] + added_BHPS
        state_RHPS.index_copy_(0, rows_B, state_BHPS)
        outputs.append((state_BHPS * c_THS[:num].unsqueeze(-2)).sum(-1))
    ends_B = states.query_starts_B1[num + 1 :].long()
    for start in range(num, len(x_THP), BLOCK):
        of_block = [tensor[start : start + BLOCK] for tensor in (x_THP, decay_TH, b_THS, c_THS)]
        token_L = torch.arange(start, start + len(of_block[0]), device=x_THP.device)
        request_L = torch.searchsorted(ends_B, token_L, right=True)
        outputs.append(_block(*of_block, state_RHPS, states.rows_B[num:], request_L))
    return torch.cat(outputs)


def _block(
    x_LHP: Tensor, decay_LH: Tensor, b_LHS: Tensor, c_LHS: Tensor, state_RHPS: Tensor, rows_B: Tensor, request_L: Tensor
) -> Tensor:
    """`recurrence` of tokens of one or more prompts: what they give each other, and what their states give them."""
    state_BHPS = state_RHPS[rows_B]
    is_seen_LL = (is_same_LL := request_L.unsqueeze(1) == request_L).tril()
    since_LH = is_seen_LL.float() @ decay_LH  # from its request's first token in the block to this one
    between_LLH = (since_LH.unsqueeze(1) - since_LH).masked_fill(~is_seen_LL.unsqueeze(-1), -torch.inf)
    weight_LLH = einsum("lhs,khs->lkh", c_LHS, b_LHS) * between_LLH.exp()
    of_past_LHP = einsum("lhs,lhps->lhp", c_LHS * since_LH.exp().unsqueeze(-1), state_BHPS[request_L])
    is_of_BL = (torch.arange(len(rows_B), device=rows_B.device).unsqueeze(1) == request_L).float()
    left_LH = is_same_LL.triu(1).float() @ decay_LH  # from the token after this one to its request's last in the block
    added_LHPS = einsum("lhp,lhs->lhps", x_LHP * left_LH.exp().unsqueeze(-1), b_LHS)
    kept_BHPS = state_BHPS * (is_of_BL @ decay_LH).exp()[..., None, None]
    state_RHPS.index_copy_(0, rows_B, kept_BHPS + einsum("bl,lhps->bhps", is_of_BL, added_LHPS))
    return einsum("lkh,khp->lhp", weight_LLH, x_LHP) + of_past_LHP
