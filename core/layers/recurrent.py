"""The operations of layers with a RecurrentState in plain torch: a short convolution and the gated delta rule.

Used for kernels that do not offer them. By the rule, decode rows are computed together, the chunks of prompts one by
one, for which the host must know their lengths. States are read and written in place, in their own dtype.
Legend: T tokens, D decode rows, R rows of states, C channels, W width of a convolution, P = W - 1 past inputs,
K key heads, H = K * G value heads, E key head dim, F value head dim, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import StateRows

CHUNK = 64
"""Tokens of a prompt whose updates of a state are computed at once, by one triangular system."""
EPS = 1e-6
"""Added under the root when queries and keys are normalised."""


def plain_short_convolution(
    x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, states: StateRows, bias_C: Tensor | None = None
) -> Tensor:
    """See Kernels.short_convolution. Device: no host sync; needs no lengths on the host, which captured steps lack."""
    starts_B, ends_B = states.query_starts_B1[:-1].long(), states.query_starts_B1[1:].long()
    past_BCP, num_past = state_RCP.index_select(0, states.rows_B), state_RCP.shape[2]

    def inputs(token_N: Tensor, request_N: Tensor) -> Tensor:
        """The inputs at these tokens of these requests, (N, C) float32: of this step, or kept from before it."""
        age_N = token_N - starts_B[request_N]
        kept_NC = past_BCP[request_N, :, (age_N + num_past).clamp(0, num_past - 1)]
        return torch.where((age_N >= 0).unsqueeze(1), x_TC[token_N.clamp(min=0)], kept_NC).float()

    token_T = torch.arange(len(x_TC), device=x_TC.device)
    request_T = torch.searchsorted(ends_B, token_T, right=True)
    out_TC = torch.zeros_like(x_TC, dtype=torch.float32) if bias_C is None else bias_C.float()
    for back, weight_C in enumerate(reversed(weight_CW.float().unbind(1))):
        out_TC = out_TC + inputs(token_T - back, request_T) * weight_C
    request_B = torch.arange(len(ends_B), device=x_TC.device)
    next_BCP = torch.stack([inputs(ends_B - back, request_B) for back in range(num_past, 0, -1)], -1)
    state_RCP.index_copy_(0, states.rows_B, next_BCP.to(state_RCP.dtype))
    return functional.silu(out_TC).to(x_TC.dtype)


def plain_gated_delta_rule(
    q_TKE: Tensor,
    k_TKE: Tensor,
    v_THF: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    state_RHEF: Tensor,
    states: StateRows,
) -> Tensor:
    """See Kernels.gated_delta_rule. Device: prompts need their lengths on the host, so no captured step has any."""
    group = v_THF.shape[1] // q_TKE.shape[1]
    q_THE = (_normalised(q_TKE) * q_TKE.shape[-1] ** -0.5).repeat_interleave(group, 1)
    k_THE = _normalised(k_TKE).repeat_interleave(group, 1)
    of_token = (q_THE, k_THE, v_THF.float(), log_decay_TH.float(), beta_TH.float())
    parts = []
    for rows_B, span in _spans(states):
        state_BHEF = state_RHEF.index_select(0, rows_B).float()
        q, k, v, log_decay, beta = (tensor[span] for tensor in of_token)
        if len(rows_B) == len(q):
            out_THF, state_BHEF = _one_token_each(q, k, v, log_decay, beta, state_BHEF)
        else:
            out_THF, state_HEF = _chunk_by_chunk(q, k, v, log_decay, beta, state_BHEF[0])
            state_BHEF = state_HEF.unsqueeze(0)
        state_RHEF.index_copy_(0, rows_B, state_BHEF.to(state_RHEF.dtype))
        parts.append(out_THF)
    return torch.cat(parts).to(v_THF.dtype)


def _spans(states: StateRows) -> Iterator[tuple[Tensor, slice]]:
    """Rows of states, and the slice of tokens that is computed with them: all decodes at once, then each chunk."""
    if states.num_decodes:
        yield states.rows_B[: states.num_decodes], slice(0, states.num_decodes)
    num_requests = len(states.rows_B)
    if num_requests == states.num_decodes:
        return
    assert states.query_starts_host is not None, "a prefill needs its lengths on the host"
    starts = states.query_starts_host.tolist()
    for row in range(states.num_decodes, num_requests):
        if starts[row] < starts[row + 1]:
            yield states.rows_B[row : row + 1], slice(starts[row], starts[row + 1])


def _normalised(x_TKE: Tensor) -> Tensor:
    x_TKE = x_TKE.float()
    return x_TKE * (x_TKE.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _one_token_each(
    q_BHE: Tensor, k_BHE: Tensor, v_BHF: Tensor, log_decay_BH: Tensor, beta_BH: Tensor, state_BHEF: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule for one token of each row: decay the state, then move the value that its key recalls towards v."""
    state_BHEF = state_BHEF * log_decay_BH.exp()[..., None, None]
    recalled_BHF = torch.einsum("bhef,bhe->bhf", state_BHEF, k_BHE)
    update_BHF = (v_BHF - recalled_BHF) * beta_BH[..., None]
    state_BHEF = state_BHEF + k_BHE.unsqueeze(-1) * update_BHF.unsqueeze(-2)
    return torch.einsum("bhef,bhe->bhf", state_BHEF, q_BHE), state_BHEF


def _chunk_by_chunk(
    q_QHE: Tensor, k_QHE: Tensor, v_QHF: Tensor, log_decay_QH: Tensor, beta_QH: Tensor, state_HEF: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule for one sequence: the updates of a chunk follow from its first state by one triangular system.

    Token i's update is beta_i (v_i - decay_i S k_i - sum over j < i of (decay_i / decay_j) (k_i k_j) update_j), where
    S is the state before the chunk and decay_i the product of decays up to token i.
    Source: Yang et al. 2024, arXiv:2412.06464.
    """
    outs = []
    for begin in range(0, len(q_QHE), CHUNK):
        q_HCE, k_HCE, v_HCF = (x[begin : begin + CHUNK].transpose(0, 1) for x in (q_QHE, k_QHE, v_QHF))
        beta_HC1 = beta_QH[begin : begin + CHUNK].T.unsqueeze(-1)
        log_HC = log_decay_QH[begin : begin + CHUNK].T.cumsum(-1)
        log_ratio_HCC = (log_HC.unsqueeze(-1) - log_HC.unsqueeze(-2)).tril()  # above the diagonal it could overflow
        ratio_HCC = log_ratio_HCC.exp().tril()
        decay_HC1 = log_HC.exp().unsqueeze(-1)
        # The diagonal counts as ones.
        system_HCC = beta_HC1 * ratio_HCC * (k_HCE @ k_HCE.transpose(-1, -2))
        wanted_HCF = beta_HC1 * (v_HCF - decay_HC1 * (k_HCE @ state_HEF))
        update_HCF = torch.linalg.solve_triangular(system_HCC, wanted_HCF, upper=False, unitriangular=True)
        of_chunk_HCF = (ratio_HCC * (q_HCE @ k_HCE.transpose(-1, -2))) @ update_HCF
        outs.append((decay_HC1 * (q_HCE @ state_HEF) + of_chunk_HCF).transpose(0, 1))
        left_HC1 = (log_HC[:, -1:] - log_HC).exp().unsqueeze(-1)
        state_HEF = state_HEF * decay_HC1[:, -1:] + (k_HCE * left_HC1).transpose(-1, -2) @ update_HCF
    return torch.cat(outs), state_HEF
