"""The numerical back end of a rank: the operations that models and core compute with.

Legend: T tokens of a step, B requests of a step, D hidden, H heads, K kv heads, E head dim, C = (H + 2K) * E,
P positions, F intermediate features of this rank, X experts, A experts of a token, R rows of recurrent states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.batch import RequestRowOperations
from hookline.core.contracts.latents import LatentProducts
from hookline.core.contracts.optional import optional
from hookline.core.contracts.quantized import QuantizedProducts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, device, dtype

    from hookline.core.contracts.batch import Batch
    from hookline.core.contracts.cache import StateRows
    from hookline.core.contracts.exchange import Exchange, PeerMemory


ATTENTION_FEATURES = ("window", "scale", "softcap", "sinks", "latent")
"""Features of attention that a layer may need beyond PLAIN_ATTENTION. Kernels list the ones they have in
Needs.attention.

"latent": values that are a part of the keys, see AttentionSpec.value_dim. "window": see Batch.window. The others are
fields of AttentionForm.
"""


@dataclass(frozen=True)
class AttentionForm:
    """How a layer's attention differs from softmax(q k / sqrt(E)) v. The window is the batch's, see Batch.window.

    scale: of the scores, in place of 1 / sqrt(E). softcap: c, for c * tanh(score / c) in place of each scaled score.
    sinks_H: (H,), for each head of this rank one more score in the softmax, without a value; a parameter of the model.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def features(self) -> frozenset[str]:
        """Which of ATTENTION_FEATURES it needs."""
        asked = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks_H}
        return frozenset(name for name, value in asked.items() if value is not None)


PLAIN_ATTENTION = AttentionForm()
"""softmax(q k / sqrt(E)) v, which all kernels compute."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as the model wants it applied.

    table_PE: (P, R) float32, cos of the R/2 frequencies then sin of the same; row p is position p. R is the head dim E,
    or less: then the first R values of a head are rotated and the others stay. Half-split layout, as in Hugging Face's
    Llama family: the first half of the rotated values pairs with their second half.
    """

    table_PE: Tensor


@dataclass(frozen=True)
class QKNorm:
    """RMS norm of each query and key head before the rotation (Qwen3).

    q_weight_E, k_weight_E: (E,), one weight for all heads. eps: added to the mean square under the root.
    """

    q_weight_E: Tensor
    k_weight_E: Tensor
    eps: float


@dataclass(frozen=True)
class DeltaNet:
    """Parameters of a gated delta net between its two products, of this rank.

    conv_CW: of short_convolution; channels of queries, of keys and of values follow each other. log_rate_H,
    decay_bias_H: of delta_gates. norm_F, eps: of rms_norm_silu_mul.
    """

    conv_CW: Tensor
    log_rate_H: Tensor
    decay_bias_H: Tensor
    norm_F: Tensor
    eps: float


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes that a Kernels object is built for.

    num_heads, num_kv_heads: of this rank: H and K. head_dim: E. block_size: tokens of a KV-cache block.
    max_num_seqs: most rows of a step, B. max_num_batched_tokens: most tokens of a step, T. max_model_len: most tokens
    of a request, prompt and output. device, dtype: of activations; a norm's weight may be float32.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    device: device
    dtype: dtype
    batch_invariant: bool = False
    """Whether a row's results must have the same bits in every batch and at every place in it, and the attention of a
    token the same bits however many tokens of its prompt are in the step. True only for kernels that declare it in
    Needs."""
    value_dim: int | None = None
    """None: a value has E numbers and lies beside its key in the cache. F: it is the last F numbers of its key, the
    cache holds keys alone, and attention returns F numbers for each head. Only for kernels that declare "latent"."""
    kv_dtype: torch.dtype | None = None
    """The dtype of the KV cache, if it is not `dtype`: torch.float8_e4m3fn, for kernels that name it in
    Needs.kv_dtypes. A key or value is rounded to `dtype`, then to the nearest number of kv_dtype, and clamped to its
    largest; sums are computed as in `dtype`. Core applies the scales of a checkpoint."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the KV cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def num_cached(self) -> int:
        """Vectors in the cache for each token and kv head: 2, the key and the value, or 1, the key alone."""
        return 2 if self.value_dim is None else 1

    @property
    def out_dim(self) -> int:
        """Numbers that attention returns for each head: the length of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def scale(self) -> float:
        """Softmax scale, 1 / sqrt(E)."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step, as far as kernels choose by them.

    num_decodes: rows of one token. num_tokens: prompt tokens, without the one token of each decode. context_len: most
    tokens that a row has in the cache at the end of the step; 0 means as few as possible. If num_tokens is larger than
    context_len, the tokens belong to several prompts. is_shared: whether decodes share a prefix, see
    Batch.shared_lens_B.
    """

    num_decodes: int = 0
    num_tokens: int = 0
    context_len: int = 0
    is_shared: bool = False


class Kernels(QuantizedProducts, RequestRowOperations, LatentProducts, Protocol):
    """The numerical back end of one rank, for classes to extend. Constructed as `Kernels(config, spec)`.

    Holds no request state. A returned tensor belongs to the caller: no later call may overwrite it, unless it is passed
    to a method that may overwrite this input. One object computes all layers, so weights, rotary tables, norms and
    sinks differ from call to call; their values do not change while steps run. The rows of inputs of `rms_norm` and of
    products need not be adjacent in memory. The KV cache of a layer is `kv_2NSKE`: (2, blocks, block_size, K, E), keys
    then values.
    If AttentionSpec.value_dim is F, it is (1, blocks, block_size, K, E), keys alone; qkv_TC has no values, C = (H + K)
    * E, `write_kv` is not called, and `attend` and `qkv_attend` return (T, H, F). Shapes below are for value_dim None.
    `hookline.core.contracts.Batch` says which tokens, positions, cache slots and block tables a step has. Decode rows
    come first in a batch.
    """

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        """Keep the sizes; allocate scratch space if the kernels need any."""
        ...

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product x @ W.T + b: (T, D) -> (T, O), as functional.linear. A class may use other kernels for few rows.

        Shapes: x_TD (T, D), the features of a row adjacent in memory, the rows not necessarily; weight_OD (O, D), a
        parameter, stored by rows (strides (D, 1)) or transposed (strides (1, O)), as most weights are on a CPU.
        """
        ...

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """silu_mul(x @ W.T): (T, D) -> (T, F) for W (2F, D), gate then up. The product may stay float32 before it.

        Rows and weight lie in memory as for `linear`.
        """
        ...

    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        """Normalise each head (if norm), then rotate by position (if rope). May overwrite q and k."""
        ...

    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        """Store token t's key and value at flat slot slot_mapping_T[t] = block * block_size + offset."""
        ...

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """qk_norm_rope and write_kv in one go, as the engine calls it: returns q (T, H, E)."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Called once a step before the first layer; may put tensors that `attend` needs into batch.scratch.

        If the model's layers have different caches, a step has several batches, with different windows or blocks. All
        of them are prepared before the first layer, so each needs its own scratch.
        A captured step captures this call too, so everything that depends on lengths must be computed on the device.
        """
        ...

    @optional
    def prepare_alike(self, batch: Batch, prepared: Batch) -> None:
        """`prepare` of a batch that differs from one already prepared in slot_mapping_T and block_table_BM alone.

        Results computed from lengths are right for both batches, so a class may copy them from prepared.scratch.
        """
        self.prepare(batch)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """Causal attention of ragged queries over the paged cache: prefill, decode and mixed.

        Query i of request b sits at position p = context_lens_B[b] - query_len_b + i and sees positions up to its own,
        above p - W with Batch.window W. The block table may name any block for positions that no query of the row sees.
        A form is passed only if it is not the plain one, and only to kernels that declare its features.
        Shapes: q_THE (T, H, E); returns (T, H, E). Head h reads kv head h // (H / K).
        Device: no host sync.
        """
        ...

    # ------------------------------------------------------------------------------------ what a class may leave out

    own_row_counts: Sequence[int] = ()
    """Numbers of rows for which the class may launch other kernels than for the numbers next to them. Products, norms
    and draws are computed once for each before the engine is ready, so that no request waits for a compiler."""

    @optional
    def step_shapes(self) -> Sequence[StepShape]:
        """Steps that together launch every kernel, in every variant, that attention may use within the spec's limits.

        Each is computed once before the engine is ready. Core adds some steps of common sizes.
        """
        return ()

    @optional
    def qkv_attend(
        self,
        qkv_TC: Tensor,
        kv_2NSKE: Tensor,
        batch: Batch,
        rope: Rope | None,
        norm: QKNorm | None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """`qk_norm_rope_write`, then `attend` with the queries it returns: (T, C) -> (T, H, E)."""
        q_THE = self.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm)
        if form is PLAIN_ATTENTION:
            return self.attend(q_THE, kv_2NSKE, batch)
        return self.attend(q_THE, kv_2NSKE, batch, form)

    @optional
    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """add_rms_norm of `linear` and the residual: (rms_norm(x @ W.T + b + residual), x @ W.T + b + residual).

        Rows and weight lie in memory as for `linear`.
        Shapes: x_TD (T, D); both results (T, O). The product may stay in float32. May overwrite the residual.
        """
        return self.add_rms_norm(self.linear(x_TD, weight_OD, bias_O), residual_TO, norm_weight_O, eps)

    @optional
    def linear_gelu_tanh_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """`linear_silu_mul` with gelu_tanh_mul in place of silu_mul.

        If it is left out, `hookline.core.layers` takes `linear` and then gelu_tanh_mul.
        """
        raise AssertionError("left out")

    @optional
    def router_logits(self, x_TD: Tensor, weight_XD: Tensor) -> Tensor:
        """The product x @ W.T in float32, as of a router whose scores must not be rounded: (T, D) -> (T, X) float32.

        Shapes: x_TD (T, D), in the model's dtype, the rows not necessarily adjacent in memory; weight_XD (X, D),
        float32, contiguous.
        """
        return x_TD.float() @ weight_XD.T

    @optional
    def route_experts(
        self, logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None, num_shared: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The A = top_k experts that softmax(logits) favours, best first, and their probabilities.

        normalise: divide each token's probabilities by their sum. scale_X: (X,), by which each expert's probability is
        then multiplied. num_shared: experts X, X + 1 and so on, which every token has behind those chosen, with weight
        1. Both are left out by a model that has none. If the method is left out, `hookline.core.layers` computes it in
        plain torch.
        Shapes: logits_TX (T, X); returns expert_TA (T, A + num_shared) int64 and weight_TA of this shape, float32.
        Device: graph-safe if the entry is; no tensor's shape depends on the routing.
        """
        raise AssertionError("left out")

    @optional
    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """Sum over a token's experts of weight * (silu_mul(x @ gate_up.T) @ down.T): (T, D) -> (T, D).

        A token's result does not depend on the other tokens. If it is left out, `hookline.core.layers` computes it in
        plain torch.
        Shapes: expert_TA (T, A) integers, different ones in each row; weight_TA (T, A) float32; gate_up_XFD
        (X, 2F, D), gate then up; down_XDF (X, D, F); both contiguous.
        Device: no host sync; graph-safe if the entry is. Writes to none of its inputs.
        """
        raise AssertionError("left out")

    @optional
    def shared_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
        shared_gate_up_FD: Tensor, shared_down_DF: Tensor, gate_T1: Tensor,
    ) -> Tensor:  # fmt: skip
        """`expert_mlp` plus sigmoid(gate) times an expert of all tokens, called only if the class has `expert_mlp`.

        Shapes: as for expert_mlp; shared_gate_up_FD (2S, D), gate then up, and shared_down_DF (D, S) lie in memory as
        for `linear`; gate_T1 (T, 1). The sum may stay in float32.
        Device: as expert_mlp.
        """
        routed_TD = self.expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)
        shared_TD = self.linear(self.linear_silu_mul(x_TD, shared_gate_up_FD), shared_down_DF, None)
        return self.sigmoid_mul(shared_TD, gate_T1, routed_TD)

    @optional
    def expert_mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
        residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """add_rms_norm of `expert_mlp` and the residual, called only if the class has `expert_mlp`.

        Shapes: as for expert_mlp; residual_TD and both results (T, D). The sum over a token's experts may stay in
        float32. May overwrite the residual, and none of the other inputs.
        Device: as expert_mlp.
        """
        out_TD = self.expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)
        return self.add_rms_norm(out_TD, residual_TD, norm_weight_D, eps)

    @optional
    def gelu_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """`expert_mlp` with gelu_tanh_mul in place of silu_mul."""
        raise AssertionError("left out")

    @optional
    def clamped_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
        down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float,
    ) -> Tensor:  # fmt: skip
        """Sum over a token's experts of weight * (((u + 1) * g * sigmoid(alpha * g)) @ down.T + down_bias): (T, D).

        g = min(gate, limit) and u = clamp(up, -limit, limit) of x @ gate_up.T + gate_up_bias. The rest is as for
        expert_mlp.
        Shapes: gate_up_bias_XF (X, 2F), gate then up; down_bias_XD (X, D), or None for no bias there.
        """
        raise AssertionError("left out")

    @optional
    def short_convolution(
        self, x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, states: StateRows, bias_C: Tensor | None = None
    ) -> Tensor:
        """A causal depthwise convolution over a sequence's last W tokens, then silu: (T, C) -> (T, C).

        Token t gets silu(bias + sum over w of weight[:, w] * x[t - (W - 1) + w]). If it is left out,
        `hookline.core.layers` computes it in plain torch.
        Shapes: weight_CW (C, W); bias_C (C,), left out by a model that has none; state_RCP (R, C, W - 1), the inputs of
        a sequence before the step's first token, oldest first, zeros before the sequence's first one; read, and
        overwritten with the inputs before the next step's first token. Its row is states.rows_B[b] for request b.
        Device: no host sync; graph-safe if the entry is.
        """
        raise AssertionError("left out")

    @optional
    def gated_delta_rule(
        self,
        q_TKE: Tensor,
        k_TKE: Tensor,
        v_THF: Tensor,
        log_decay_TH: Tensor,
        beta_TH: Tensor,
        state_RHEF: Tensor,
        states: StateRows,
    ) -> Tensor:
        """Linear attention that forgets and corrects its state S, a matrix for each value head: (T, H, F).

        For each token in order: S = exp(log_decay) S; S = S + k (beta (v - k S)); the result is q S. Queries and keys
        are first divided by sqrt(sum of squares + 1e-6), and queries by sqrt(E). If it is left out,
        `hookline.core.layers` computes it in plain torch.
        Shapes: q_TKE, k_TKE (T, K, E) for K key heads; v_THF (T, H, F) for H value heads, of which H / K in a row share
        a key head; log_decay_TH (T, H) float32, at most 0; beta_TH (T, H) float32; state_RHEF (R, H, E, F), read and
        written, whose row is states.rows_B[b] for request b. Computed in float32.
        Device: no host sync; graph-safe if the entry is.
        Source: Yang et al. 2024, arXiv:2412.06464.
        """
        raise AssertionError("left out")

    @optional
    def gated_delta_net(
        self,
        mixed_TC: Tensor,
        beta_TH: Tensor,
        decay_TH: Tensor,
        gate_THF: Tensor,
        net: DeltaNet,
        conv_RCP: Tensor,
        memory_RHEF: Tensor,
        states: StateRows,
    ) -> Tensor:
        """short_convolution of mixed_TC, gated_delta_rule with delta_gates, rms_norm_silu_mul of its result: (T, H, F).

        What each hands to the next may stay in float32. If it is left out, they are called one after the other.
        Shapes and device: as of these operations, whose inputs may be columns of wider matrices.
        """
        raise AssertionError("left out")

    @optional
    def mask_logits(self, logits_NV: Tensor, masks_RW: Tensor, index_N: Tensor) -> Tensor:
        """New logits (N, V), with -inf for each token that the mask of its row forbids, as a grammar does.

        Bit t % 32 of word t // 32 of a mask is set if token t is allowed. Shapes: logits_NV, whose rows need not be
        adjacent in memory; masks_RW (R, W) int32 with 32 * W >= V; index_N (N,) int64, the mask of each row.
        Device: no host sync; graph-safe.
        """
        words_NW = masks_RW.index_select(0, index_N)
        bits_32 = (words_NW.new_ones(32).cumsum(0) - 1).to(words_NW.dtype)
        allowed_NV = (words_NW.unsqueeze(2) >> bits_32 & 1).bool().flatten(1)[:, : logits_NV.shape[1]]
        return logits_NV.masked_fill(~allowed_NV, -math.inf)

    @optional
    def exchange(self, peers: PeerMemory) -> Exchange:
        """Collectives of a few rows through this memory: each GPU reads the memory of the others.

        Called once, on every rank, when the engine starts. If it is left out, all collectives go through
        torch.distributed.
        """
        raise AssertionError("left out")
