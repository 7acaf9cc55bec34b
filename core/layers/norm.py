"""RMS norm of all query heads together, and of all key heads together, where the heads are split over the ranks.

For models that normalise the whole output of the projections (OLMo 2); norms of single heads are done by the kernels,
see `QKNorm`. Legend: T tokens, C = (H + 2K) * E, H heads, K kv heads, E head dim; all of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.core.contracts import Runtime, WeightTarget
from hookline.core.errors import ConfigError
from hookline.core.layers.linear import QKVParallelLinear
from hookline.core.layers.weights import empty_parameter


class WholeQKNorm:
    """Normalises queries over the heads of all ranks, and keys likewise; values stay.

    The ranks add up their mean squares, two numbers a token. Kv heads may be replicated on several ranks; since all
    ranks hold equally many, the mean over ranks is still the mean over heads.
    qkv: the projection whose output is normalised; it says which heads this rank has. eps: added to the mean square.
    Shapes: qkv_TC (T, C) as `qkv` gives it -> (T, C). May overwrite its input.
    Raises: ConfigError for several ranks in batch-invariant mode.
    """

    def __init__(self, qkv: QKVParallelLinear, runtime: Runtime, eps: float) -> None:
        """Allocate the weights of this rank's heads, uninitialised, on runtime.device."""
        if runtime.batch_invariant and runtime.ranks.size > 1:
            raise ConfigError(
                f"engine.batch_invariant=true with tp={runtime.ranks.size}: norms over the heads of all ranks would "
                "depend on the batch; use tp=1"
            )
        self.ranks, self.kernels, self.eps = runtime.ranks, runtime.kernels, eps
        self.parts = qkv.parts[:2]
        self.q_weight_C, self.k_weight_C = (empty_parameter(runtime, part.size) for part in self.parts)

    def __call__(self, qkv_TC: Tensor) -> Tensor:
        """Normalise queries and keys: (T, C) -> (T, C). With several ranks, one collective of (T, 2) float32."""
        num_q, num_k = (part.size for part in self.parts)
        q_TC, k_TC = qkv_TC[:, :num_q], qkv_TC[:, num_q : num_q + num_k]
        if self.ranks.size == 1:
            q_TC.copy_(self.kernels.rms_norm(q_TC, self.q_weight_C, self.eps))
            k_TC.copy_(self.kernels.rms_norm(k_TC, self.k_weight_C, self.eps))
            return qkv_TC
        mean_T2 = torch.stack([x_TC.float().square().mean(-1) for x_TC in (q_TC, k_TC)], -1)
        scale_T2 = (self.ranks.all_reduce(mean_T2) / self.ranks.size + self.eps).rsqrt()
        q_TC.copy_(q_TC.float() * scale_T2[:, :1] * self.q_weight_C)
        k_TC.copy_(k_TC.float() * scale_T2[:, 1:] * self.k_weight_C)
        return qkv_TC

    def targets(self, q_name: str, k_name: str) -> dict[str, WeightTarget]:
        """`q_name.weight` and `k_name.weight` -> this rank's heads."""
        (q_part, k_part), (q_C, k_C) = self.parts, (self.q_weight_C, self.k_weight_C)
        return {
            f"{q_name}.weight": WeightTarget.shard(q_C, 0, q_part, init="ones"),
            f"{k_name}.weight": WeightTarget.shard(k_C, 0, k_part, init="ones"),
        }
