"""Checks that models, kernels, samplers and extensions keep their contracts, in results and in calls of `attend`.

Everything is checked once per kind of step: in the first eager step, and in the run before the first capture. In later
eager steps only the shapes and dtypes of draws are checked, which the host knows; looking at values waits for the
device. Legend: as in core/contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    NO_TOKEN,
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Kernels,
    LayerCache,
    ModelSpec,
    NoCache,
    QKNorm,
    RecurrentState,
    Rope,
    SharedCache,
    is_offered,
)
from hookline.core.errors import shown
from hookline.core.worker.form_checks import FormChecks, described, form_fault

ROWS_LOOKED_AT = 8
"""Rows of logits that are kept to see whether a sampler wrote to them."""
Form = Callable[..., Sequence[Sequence[int]]]


class StepChecks(FormChecks):
    """Checks of first steps: they raise StepFault naming the plugin that broke its contract, and the method.

    names: of the plugins, by kind. sizes, spec: the expected sizes of hidden states and of arguments of `attend`; None
    leaves their widths unchecked.
    """

    def __init__(
        self,
        names: Mapping[str, str] | None = None,
        sizes: AttentionSpec | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        super().__init__(names)
        self._sizes, self._spec = sizes, spec

    def hidden(self, hidden_XD: Any, *num_rows: int) -> None:
        """Check what a model's forward returned: one row for each token, or for each wanted one."""
        is_rows = isinstance(hidden_XD, Tensor) and hidden_XD.ndim == 2 and len(hidden_XD) in num_rows
        is_wide = self._spec is None or (is_rows and hidden_XD.shape[1] == self._spec.hidden_size)
        if not is_rows or not is_wide or not hidden_XD.is_floating_point():
            rows = " or ".join(str(count) for count in dict.fromkeys(num_rows))
            wanted = f"{rows} rows" + (f" of hidden_size={self._spec.hidden_size}" if self._spec is not None else "")
            raise self.fault("model", "forward", f"it returned {described(hidden_XD)}, not hidden states of {wanted}")

    def attended(
        self, num_tokens: int, layer: int, qkv_TC: Any, rope: Any, norm: Any, form: Any = PLAIN_ATTENTION
    ) -> None:
        """Check what a model's forward gave `attend` for a step of num_tokens tokens; looks at no values."""
        cache = self._cache_of(layer, "attend")
        if self._sizes is None or self._spec is None:
            return
        if isinstance(cache, RecurrentState | NoCache):
            what = f"it called attend for layer {layer}, which has no keys and values by its spec.layers"
            raise self.fault("model", "forward", what)
        fault = attend_fault(self._sizes, self._spec, cache, num_tokens, qkv_TC, rope, norm, form)
        if fault:
            raise self.fault("model", "forward", f"it called attend(layer={layer}) with {fault}")

    def keeps_state(self, layer: int) -> None:
        """Check that a layer whose state a model's forward asked for has one."""
        cache = self._cache_of(layer, "attend.states")
        if cache is not None and not isinstance(cache, RecurrentState):
            what = f"it called attend.states for layer {layer}, which keeps no state by its spec.layers"
            raise self.fault("model", "forward", what)

    def _cache_of(self, layer: Any, called: str) -> LayerCache | None:
        """The cache that a layer keeps by the model's spec; None if the spec is not known here."""
        if self._spec is None:
            return None
        if not isinstance(layer, int) or not 0 <= layer < self._spec.num_layers:
            what = f"it called {called} for layer {shown(layer)}; by its spec it has layers 0 to"
            raise self.fault("model", "forward", f"{what} {self._spec.num_layers - 1}")
        return self._spec.cache_layers[layer]

    def logits(self, logits_NV: Any, num_rows: int, num_columns: int) -> None:
        """Check what a model's logits returned; there may be more columns than the vocabulary has tokens."""
        is_wide = isinstance(logits_NV, Tensor) and logits_NV.ndim == 2 and logits_NV.shape[1] >= num_columns
        if not is_wide or len(logits_NV) != num_rows or not logits_NV.is_floating_point():
            wanted = f"({num_rows}, {num_columns})"
            raise self.fault("model", "logits", f"it returned {described(logits_NV)}, not logits of shape {wanted}")

    @contextmanager
    def sampling(self, method: str, logits_NV: Tensor) -> Iterator[None]:
        """Around a sampler's call: check that it leaves the logits as they are."""
        before_NV = logits_NV[:ROWS_LOOKED_AT].clone()
        yield
        after_NV = logits_NV[:ROWS_LOOKED_AT]
        if not bool(((before_NV == after_NV) | (before_NV.isnan() & after_NV.isnan())).all()):
            raise self.fault("sampler", method, "it wrote to the logits")

    def tokens(self, method: str, tokens_N: Any, logits_NV: Tensor) -> None:
        """Check a sampler's tokens: one token of the vocabulary for each row, or NO_TOKEN if the row holds NaN."""
        num_rows, vocab_size = logits_NV.shape
        self.form("sampler", method, tokens_N, (num_rows,), torch.int64)
        has_token_N = (tokens_N != NO_TOKEN) | ~logits_NV.isnan().any(1)
        self.inside("sampler", method, tokens_N[has_token_N], "token id", "the vocabulary", 0, vocab_size)

    def shard(self, found: Any, num_rows: int, first: int, end: int) -> None:
        """Check the result of `sample_shard`: for each row a score and a token of the shard, `first` <= token < `end`;
        or NaN and NO_TOKEN.
        """
        scores_N, tokens_N = self.shard_form(found, num_rows)
        has_token_N = ~scores_N.isnan() | (tokens_N != NO_TOKEN)
        if bool(scores_N[has_token_N].isnan().any()):
            raise self.fault("sampler", "sample_shard", "a score is NaN")
        self.inside("sampler", "sample_shard", tokens_N[has_token_N], "token id", "the shard", first, end)

    def scores(self, scored_NX: Any, tokens_N: Tensor, num_logprobs: int, vocab_size: int) -> None:
        """Check what a sampler's `score` returned: rows as `core.worker.results.scores.scored` makes them."""
        self.form("sampler", "score", scored_NX, (len(tokens_N), 2 + 2 * num_logprobs), torch.int64)
        if not torch.equal(scored_NX[:, 0], tokens_N):
            raise self.fault("sampler", "score", "its first column is not the tokens that it was given")
        ids_NK = scored_NX[tokens_N != NO_TOKEN, 2 : 2 + num_logprobs]
        self.inside("sampler", "score", ids_NK, "token id", "the vocabulary", 0, vocab_size)

    def inside(self, kind: str, method: str, ids: Tensor, what: str, of: str, first: int, end: int) -> None:
        """Check that ids lie in a range."""
        outside = ids[(ids < first) | (ids >= end)]
        if len(outside):
            verb = "drew" if kind == "sampler" else "returned"
            line = f"it {verb} {what} {int(outside[0])}, which is outside {of} ({first} to {end - 1})"
            raise self.fault(kind, method, line)

    @contextmanager
    def kernels(self, kernels: Kernels) -> Iterator[None]:
        """Around a model's forward: check that what its kernels return has the right shapes and dtypes.

        Methods that a model or a layer took from the kernels object beforehand are not checked.
        """
        if not hasattr(kernels, "__dict__"):
            yield
            return
        before = dict(vars(kernels))
        for name in FORMS:
            method = getattr(kernels, name, None)
            if method is not None and (is_offered(method) or name in _BY_DEFAULT):
                setattr(kernels, name, partial(self._checked, name, method))
        try:
            yield
        finally:
            for name in FORMS:
                vars(kernels).pop(name, None)
            vars(kernels).update({name: before[name] for name in FORMS if name in before})

    def _checked(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        first = arguments[0] if arguments else None
        dtypes = [first.dtype] if isinstance(first, Tensor) and first.is_floating_point() else []
        all_dtypes = [[one] for one in DTYPES[name]] if name in DTYPES else [dtypes] * 2
        try:
            shapes = FORMS[name](*arguments, **named)
        except TypeError:
            return method(*arguments, **named)  # its signature differs from core's
        if name in _ATTENDING and self._sizes is not None:
            shapes = [(*shapes[0][:-1], self._sizes.out_dim)]
        found = method(*arguments, **named)
        for part, shape, allowed in zip(
            self.parts("kernels", name, found, len(shapes)), shapes, all_dtypes, strict=False
        ):
            self.form("kernels", name, part, shape, *allowed)
        if name == "route_experts":
            num_experts = arguments[0].shape[1] + shapes[0][1] - arguments[1]  # with those that every token has
            self.inside("kernels", name, found[0], "expert", "the experts", 0, num_experts)
        return found


def attend_width(sizes: AttentionSpec, cache: LayerCache | None) -> int:
    """Columns of a layer's input of `attend`: queries, and keys and values unless it uses another layer's cache."""
    has_keys = not isinstance(cache, SharedCache)
    return (sizes.num_heads + sizes.num_cached * sizes.num_kv_heads * has_keys) * sizes.head_dim


def attend_fault(
    sizes: AttentionSpec,
    spec: ModelSpec,
    cache: LayerCache | None,
    num_tokens: int,
    qkv_TC: Any,
    rope: Any,
    norm: Any,
    form: Any,
) -> str:
    """A short description of a model's wrong argument of `attend` for a layer of this cache; empty if all are right."""
    if fault := form_fault(qkv_TC, (num_tokens, attend_width(sizes, cache)), [sizes.dtype], "qkv_TC of"):
        return fault
    for what, value, kind in (("rope", rope, Rope), ("norm", norm, QKNorm)):
        if not isinstance(value, kind | None):
            return f"{what} {described(value)}, not a {kind.__name__} or None"
    if not isinstance(form, AttentionForm):
        return f"form {described(form)}, not an AttentionForm"
    unsaid = sorted(form.features - spec.attention_features)
    if unsaid:
        return f"a form that has {', '.join(unsaid)}, which its spec.attention does not name"
    faults = [form_fault(form.sinks_H, (sizes.num_heads,), (), "form.sinks_H of")] if form.sinks_H is not None else []
    if norm is not None:
        for name in ("q_weight_E", "k_weight_E"):
            faults.append(form_fault(getattr(norm, name), (sizes.head_dim,), (), f"norm.{name} of"))
    if rope is not None:
        faults.append(_table_fault(rope.table_PE, sizes, qkv_TC.device))
    return next(filter(None, faults), "")


def _table_fault(table_PE: Any, sizes: AttentionSpec, device: torch.device) -> str:
    if not isinstance(table_PE, Tensor) or table_PE.ndim != 2 or table_PE.dtype != torch.float32:
        return f"rope.table_PE of {described(table_PE)}, not a table (P, R) of float32"
    num_positions, width = table_PE.shape
    if width % 2 or not 0 < width <= sizes.head_dim:
        return (
            f"rope.table_PE of {described(table_PE)}, not of an even number of columns up to head_dim={sizes.head_dim}"
        )
    if num_positions < sizes.max_model_len:
        return f"rope.table_PE of {num_positions} positions, fewer than max_model_len={sizes.max_model_len}"
    return f"rope.table_PE on {table_PE.device}, not on {device}" if table_PE.device != device else ""


def _queries(
    qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Any, rope: Any, norm: Any, form: Any = None
) -> Sequence[Sequence[int]]:
    num_cached, (num_kv_heads, head_dim) = len(kv_2NSKE), kv_2NSKE.shape[-2:]
    return [(len(qkv_TC), qkv_TC.shape[1] // head_dim - num_cached * num_kv_heads, head_dim)]


FORMS: dict[str, Form] = {
    "rms_norm": lambda x_TD, weight_D, eps: [x_TD.shape],
    "add_rms_norm": lambda x_TD, residual_TD, weight_D, eps: [x_TD.shape, x_TD.shape],
    "linear": lambda x_TD, weight_OD, bias_O: [(*x_TD.shape[:-1], len(weight_OD))],
    "linear_silu_mul": lambda x_TD, gate_up_weight_FD: [(*x_TD.shape[:-1], len(gate_up_weight_FD) // 2)],
    "linear_gelu_tanh_mul": lambda x_TD, gate_up_weight_FD: [(*x_TD.shape[:-1], len(gate_up_weight_FD) // 2)],
    "silu_mul": lambda gate_up_TF: [(*gate_up_TF.shape[:-1], gate_up_TF.shape[-1] // 2)],
    "gelu_tanh_mul": lambda gate_up_TF: [(*gate_up_TF.shape[:-1], gate_up_TF.shape[-1] // 2)],
    "qk_norm_rope": lambda q_THE, k_TKE, positions_T, rope, norm: [q_THE.shape, k_TKE.shape],
    "qk_norm_rope_write": _queries,
    "attend": lambda q_THE, kv_2NSKE, batch, form=None: [q_THE.shape],
    "qkv_attend": _queries,
    "linear_add_rms_norm": lambda x_TD, weight_OD, bias_O, residual_TO, norm_weight_O, eps: (
        [(len(x_TD), len(weight_OD))] * 2
    ),
    "quantized_linear": lambda x_TD, weight, bias_O: [(*x_TD.shape[:-1], weight.num_rows)],
    "quantized_linear_silu_mul": lambda x_TD, weight: [(*x_TD.shape[:-1], weight.num_rows // 2)],
    "quantized_linear_add_rms_norm": lambda x_TD, weight, bias_O, residual_TO, norm_weight_O, eps: (
        [(len(x_TD), weight.num_rows)] * 2
    ),
    "quantized_expert_mlp": lambda x_TD, *others: [x_TD.shape],
    "quantized_expert_mlp_add_rms_norm": lambda x_TD, *others: [x_TD.shape] * 2,
    "norm_add_rms_norm": lambda x_TD, inner_weight_D, residual_TD, weight_D, *others: (
        [(*weight_D.shape[:-1], *x_TD.shape), x_TD.shape]
    ),
    "norm_heads": lambda x_TN, head_dim, eps, places_C, scale_C, width: [(len(x_TN), len(places_C))],
    "take_columns": lambda x_TD, places_N: [(len(x_TD), len(places_N))],
    "rms_norm_silu_mul": lambda x_THE, weight_E, eps, gate_THE: [x_THE.shape],
    "sigmoid_mul": lambda x_TD, gate_TG, added_TD=None: [x_TD.shape],
    "mask_logits": lambda logits_NV, masks_RW, index_N: [logits_NV.shape],
    "delta_gates": lambda beta_TH, decay_TH, log_rate_H, decay_bias_H: [beta_TH.shape] * 2,
    "short_convolution": lambda x_TC, weight_CW, state_RCP, states, bias_C=None: [x_TC.shape],
    "gated_delta_net": lambda mixed_TC, beta_TH, decay_TH, gate_THF, *others: [gate_THF.shape],
    "gated_delta_rule": lambda q_TKE, k_TKE, v_THF, log_decay_TH, beta_TH, state_RHEF, states: [v_THF.shape],
    "latent_queries_keys": lambda q_THC, latent_TE, keys_HPL, *others: (
        [(len(q_THC), (q_THC.shape[1] + 1) * latent_TE.shape[1])]
    ),
    "heads_linear": lambda x_THI, weight_HOI: [(len(x_THI), weight_HOI.shape[0] * weight_HOI.shape[1])],
    "router_logits": lambda x_TD, weight_XD: [(len(x_TD), len(weight_XD))],
    "route_experts": lambda logits_TX, top_k, normalise, scale_X=None, num_shared=0: (
        [(len(logits_TX), top_k + num_shared)] * 2
    ),
    "expert_mlp": lambda x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF: [x_TD.shape],
    "shared_expert_mlp": lambda x_TD, *others: [x_TD.shape],
    "expert_mlp_add_rms_norm": lambda x_TD, *others: [x_TD.shape] * 2,
    "gelu_expert_mlp": lambda x_TD, *others: [x_TD.shape],
    "clamped_expert_mlp": lambda x_TD, *others: [x_TD.shape],
}
"""By method of kernels, a function from its arguments to the shapes of its results."""
DTYPES = {
    "router_logits": (torch.float32,),
    "route_experts": (torch.int64, torch.float32),
    "delta_gates": (torch.float32, torch.float32),
}
"""By method, the dtypes of results that do not have the first argument's dtype."""
_ATTENDING = ("attend", "qkv_attend")
"""Operations whose results have the heads of queries and the head dim of values."""
_BY_DEFAULT = ("qkv_attend", "linear_add_rms_norm", "shared_expert_mlp", "expert_mlp_add_rms_norm")
"""Optional operations that every class of kernels has, since the base class composes them of other operations."""
