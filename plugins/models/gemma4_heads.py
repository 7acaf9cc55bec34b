"""Gemma 4's attention: layers have heads of two sizes, and the cache has entries of one size.

A layer's cache has entries of one size E. Small kv heads share an entry, each in its own lane, and a query has zeros in
the lanes of other heads, so that only its own key counts in its score; of the attention output, its own lane is kept.
If there are fewer kv heads than entries, they are written several times. So layers with 8 heads of 256 numbers and
layers with 2 heads of 512 have 4 entries of 512, none of them with zeros.
Numbers that are rotated lie first in an entry: the first halves of all lanes, then the second, then the others.
Legend: T tokens, H heads and K entries of this rank, E numbers of an entry, N numbers of a projection, C = (H + 2K) * E
of a layer with keys of its own, H * E of others, P positions, R rotated numbers of an entry, F numbers of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hookline.core.contracts import Attend, AttentionForm, Part, Ranks, Rope, Runtime, WeightTarget
from hookline.core.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, even_part, rope_table
from hookline.plugins.models.gemma4_config import Heads, Shape

FORM = AttentionForm(scale=1.0)
"""Scores are not scaled: the norms of queries and keys do it."""


class HeadLayout:
    """Where the numbers of this rank's heads lie in entries, for all layers of a type."""

    def __init__(self, shape: Shape, heads: Heads, runtime: Runtime) -> None:
        self.shape, self.heads = shape, heads
        self.q_heads = even_part(shape.num_heads, runtime.ranks, "num_attention_heads")
        self.kv_heads, self.entries = (
            kv_part(number, runtime.ranks) for number in (heads.num_kv_heads, shape.num_entries)
        )
        rotated, lanes = heads.num_rotated, heads.lanes
        table_PF = rope_table(heads.rope, heads.head_dim, runtime.max_model_len or shape.max_position)
        cos_PR, sin_PR = (part_PF[:, :rotated].repeat(1, lanes) for part_PF in table_PF.chunk(2, 1))
        self.rope = Rope(torch.cat((cos_PR, sin_PR), 1).to(runtime.device))
        own_kv, shared_kv = self._sources(has_keys=True), self._sources(has_keys=False)
        self.source_C, self.query_source_C = own_kv.to(runtime.device), shared_kv.to(runtime.device)
        self.attended_N = self._attended().to(runtime.device)

    def lane(self, head: int) -> int:
        """The lane of a query head, counted over all ranks."""
        return head * self.heads.num_kv_heads // self.shape.num_heads % self.heads.lanes

    def key_heads(self) -> Iterator[tuple[int, int, int]]:
        """(entry, lane, kv head) of each of this rank's kv heads; entries and heads are counted within the rank."""
        for place in range(self.entries.size):
            for lane in range(self.heads.lanes):
                head = (self.entries.start + place) // self.heads.copies * self.heads.lanes + lane - self.kv_heads.start
                if 0 <= head < self.kv_heads.size:
                    yield place, lane, head

    def ranges(self, lane: int) -> list[tuple[int, int, int]]:
        """The ranges of a query or key in a lane: (first number of the head, first number in the entry, how many)."""
        size, rotated, lanes = self.heads.head_dim, self.heads.num_rotated, self.heads.lanes
        half, others = size // 2, size // 2 - rotated
        behind = 2 * lanes * rotated + lane * 2 * others
        found = [
            (0, lane * rotated, rotated),
            (half, (lanes + lane) * rotated, rotated),
            (rotated, behind, others),
            (half + rotated, behind + others, others),
        ]
        return [one for one in found if one[2]]

    def _sources(self, *, has_keys: bool) -> Tensor:
        """For each number of the entries, the number of the projection (C,); -1 for zeros."""
        size, entry = self.heads.head_dim, self.shape.head_dim
        num_q, num_k = self.q_heads.size, self.entries.size
        source = torch.full((num_q + 2 * num_k * has_keys, entry), -1, dtype=torch.int32)
        for head in range(num_q):
            for first, place, count in self.ranges(self.lane(self.q_heads.start + head)):
                source[head, place : place + count] = torch.arange(count) + head * size + first
        for place, lane, head in self.key_heads() if has_keys else ():
            for first, at, count in self.ranges(lane):
                source[num_q + place, at : at + count] = torch.arange(count) + (num_q + head) * size + first
            value = torch.arange(size) + (num_q + self.kv_heads.size + head) * size
            source[num_q + num_k + place, lane * size : (lane + 1) * size] = value
        return source.flatten()

    def _attended(self) -> Tensor:
        """For each number of this rank's heads, its place in the attention output."""
        size, entry = self.heads.head_dim, self.shape.head_dim
        lanes = [self.lane(head) for head in range(self.q_heads.start, self.q_heads.stop)]
        starts = [head * entry + lane * size for head, lane in enumerate(lanes)]
        return torch.cat([torch.arange(start, start + size, dtype=torch.int32) for start in starts])


class Gemma4Attention:
    """Queries, keys and values are normalised head by head, the last without a weight; scores are not scaled."""

    def __init__(self, index: int, shape: Shape, layout: HeadLayout, runtime: Runtime) -> None:
        self.index, self.layout, self.kernels, self.eps = index, layout, runtime.kernels, shape.eps
        heads, hidden, bias = layout.heads, shape.hidden_size, shape.attention_bias
        num_numbers = shape.num_heads * heads.head_dim
        self.has_keys = shape.shared[index] is None
        self.qkv: ColumnParallelLinear
        if self.has_keys:
            self.qkv = QKVParallelLinear(
                hidden, shape.num_heads, heads.num_kv_heads, heads.head_dim, runtime, bias=bias
            )
        else:
            self.qkv = ColumnParallelLinear(hidden, num_numbers, runtime, bias=bias)
        source_C = layout.source_C if self.has_keys else layout.query_source_C
        self.source_C, self.scale_C = source_C, torch.ones(len(source_C), device=runtime.device, dtype=runtime.dtype)
        self.output = RowParallelLinear(num_numbers, hidden, runtime, bias=bias)

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        """The attention output of this rank's heads: (T, D) -> (T, H * F)."""
        layout, places = self.layout, (self.source_C, self.scale_C, self.layout.shape.head_dim)
        qkv_TC = self.kernels.norm_heads(self.qkv(x_TD), layout.heads.head_dim, self.eps, *places)
        attended_TC = attend(self.index, qkv_TC, layout.rope, None, FORM)
        is_whole = layout.heads.head_dim == layout.shape.head_dim
        return attended_TC if is_whole else self.kernels.take_columns(attended_TC, layout.attended_N)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """The projections and their norms. Checkpoints also hold keys and values that no layer reads."""
        layout, q_heads = self.layout, self.layout.q_heads
        lanes = [layout.lane(head) for head in range(q_heads.start, q_heads.stop)]
        targets = {
            f"{name}.q_norm.weight": self._norm_target(list(enumerate(lanes))),
            **self.output.targets(f"{name}.o_proj"),
        }
        if not self.has_keys:
            unread = {f"{name}.{part}.*": WeightTarget.ignored() for part in ("k_proj", "v_proj", "k_norm")}
            return {**targets, **self.qkv.targets(f"{name}.q_proj"), **unread}
        values = f"{name}.k_proj" if layout.heads.values_are_keys else f"{name}.v_proj"
        keys = [(q_heads.size + place, lane) for place, lane, _ in layout.key_heads()]
        return {
            **targets,
            f"{name}.k_norm.weight": self._norm_target(keys),
            **self.qkv.targets(f"{name}.q_proj", f"{name}.k_proj", values),
        }

    def _norm_target(self, places: list[tuple[int, int]]) -> WeightTarget:
        """A norm's weight, for heads at these entries and lanes of attention's input."""
        size, scale_XE = self.layout.heads.head_dim, self.scale_C.view(-1, self.layout.shape.head_dim)
        pieces = [
            WeightTarget.shard(scale_XE[place, at : at + count], 0, Part(size, first, first + count), init="ones")
            for place, lane in places
            for first, at, count in self.layout.ranges(lane)
        ]
        return replace(pieces[0], more=tuple(pieces[1:]))


def kv_part(num_heads: int, ranks: Ranks) -> Part:
    """This rank's part of num_heads kv heads or entries, as QKVParallelLinear splits them."""
    first = ranks.rank * num_heads // ranks.size
    return Part(num_heads, first, first + max(1, num_heads // ranks.size))
