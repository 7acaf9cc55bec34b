"""The part of Kernels that is about multi-head latent attention in its absorbed form: what surrounds `attend`.

All heads attend over one latent for each token. The matrix that makes a head's keys of the latent multiplies its
queries instead, and the matrix that makes its values multiplies its attention output.
Legend: T tokens, H heads of this rank, P numbers of a query that are not rotated, R rotated ones, C = P + R, L latent,
E = R + L, I input and O output features of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hookline.core.contracts.norms import NormsAndGates
from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from torch import Tensor


class LatentProducts(NormsAndGates, Protocol):
    """Products by a matrix for each head; `Kernels` extends it. A class overrides the plain versions to save launches.

    The rows of a matrix lie in memory as for `linear`.
    """

    @optional
    def latent_queries_keys(
        self, q_THC: Tensor, latent_TE: Tensor, keys_HPL: Tensor, norm_weight_L: Tensor, eps: float,
        interleaved: bool,
    ) -> Tensor:  # fmt: skip
        """Queries and keys as `attend` takes them, not yet rotated: (T, (H + 1) * E), rotated numbers first.

        A head's query is its last R numbers, then its first P times its matrix; the key, behind the queries, is the
        last R numbers of latent_TE, then rms_norm of its first L. interleaved: the R numbers pair with their
        neighbours, and are reordered so that their first half pairs with their second.
        Shapes: q_THC (T, H, C) and latent_TE (T, L + R), the numbers of a token adjacent, the tokens not necessarily;
        keys_HPL (H, P, L). Writes to none of its inputs.
        """
        num_heads, plain, latent = keys_HPL.shape
        rotary = q_THC.shape[2] - plain
        qk_TXE = q_THC.new_empty(len(q_THC), num_heads + 1, rotary + latent)
        queries_THE, key_TE = qk_TXE[:, :-1], qk_TXE[:, -1]
        queries_THE[..., :rotary] = _by_halves(q_THC[..., plain:]) if interleaved else q_THC[..., plain:]
        queries_HTL, plain_HTP = queries_THE[..., rotary:].transpose(0, 1), q_THC[..., :plain].transpose(0, 1)
        queries_HTL.baddbmm_(plain_HTP, keys_HPL, beta=0)
        key_TE[:, :rotary] = _by_halves(latent_TE[:, latent:]) if interleaved else latent_TE[:, latent:]
        key_TE[:, rotary:] = self.rms_norm(latent_TE[:, :latent], norm_weight_L, eps)
        return qk_TXE.flatten(1)

    @optional
    def heads_linear(self, x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
        """The product of each head with its own matrix: (T, H, I) -> (T, H * O).

        Shapes: x_THI, the numbers of a head adjacent; weight_HOI (H, O, I). Writes to none of its inputs.
        """
        out_THO = x_THI.new_empty(len(x_THI), *weight_HOI.shape[:2])
        out_THO.transpose(0, 1).baddbmm_(x_THI.transpose(0, 1), weight_HOI.mT, beta=0)
        return out_THO.flatten(1)


def _by_halves(x: Tensor) -> Tensor:
    """Every second number from the first on, then the others."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
