"""The sizes and shapes of steps for which CUDA graphs are captured, to which other steps are padded. Plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hookline.core.contracts import Joining
from hookline.core.scheduling import TILE_TOKENS

TOKEN_COUNTS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
"""Tokens of captured steps with prompts; larger steps take the card longer than the host takes to launch them."""
MOST_MIXED = 512
"""Mixed steps are captured only if max_num_batched_tokens is at most this; steps of prompts alone always are."""
LAUNCH_BOUND = 1e13
"""Number of weights times number of tokens, from which on a step takes the card longer than its launch takes the host.
A launch takes 5 to 30 ms, depending on how many threads compete for the interpreter (docs/log, 2026-11-22)."""
LEAST_SAVED = 64
"""A mixed step is padded to a multiple of TILE_TOKENS only if that is at least this much below the largest step."""
MAX_ROWS = 16
"""Prompts that a captured step has room for, besides decodes that are computed as prompts of one token."""
DECODE_STEP = 16
"""Decodes of captured mixed steps are multiples of it; further decodes are computed as prompts of one token."""
MAX_MIXED_LEN = 16_384
"""Longest requests with which mixed steps are captured: prompts of one token read their context one after the other."""
JOINED = (32, 64, 128)
"""Decodes for which captured steps with prompts have room where mixed steps are not captured in any case."""
MOST_JOINED = 1280
"""Tokens of the largest such step."""
COARSE_JOINED = (64, 128, 256, 384, 512, 768, 1024)
"""Tokens of such steps for small models, which have graphs for prompts of all TOKEN_COUNTS: tokens take little time
there, and fewer graphs make a start shorter."""

TOKEN_ROWS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""Tokens of captured steps in which every token is a row of its own, as in decodes of several tokens. Up to the last, a
step is bound by the memory that weights are read from, so that further tokens cost little; no step whose decodes
compute several tokens has more."""
MOST_ROW_TOKENS = 16
"""Tokens of a request in the largest such step of few requests."""


def token_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Tokens of the steps to capture in which every token is a row of its own, ascending."""
    most = min(max_num_batched_tokens, MOST_ROW_TOKENS * max_num_seqs, TOKEN_ROWS[-1])
    return [*(size for size in TOKEN_ROWS if size < most), most]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture, up to max_num_seqs; from 32 rows on, at most a quarter of a captured batch is padding."""
    sizes = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, max_num_seqs}
    step, size = 16, 80
    while size <= max_num_seqs:
        sizes.add(size)
        step = max(16, size // 8 // 16 * 16)
        size += step
    return sorted(size for size in sizes if size <= max_num_seqs)


def captured_prompt_tokens(num_layers: int, hidden_size: int, num_ranks: int) -> int:
    """Tokens of the largest captured step of prompts for a model of these sizes, one of TOKEN_COUNTS.

    A layer is assumed to have 12 * hidden_size² weights, as in a plain decoder; a token uses about as many of experts.
    """
    num_weights = 12 * num_layers * hidden_size**2 / num_ranks
    return max(size for size in TOKEN_COUNTS if size <= max(MOST_MIXED, LAUNCH_BOUND / num_weights))


@dataclass(frozen=True)
class PromptShape:
    """The shape of a captured step with prompts.

    Its first num_decodes tokens are decodes; the others belong to num_rows requests and to a padding row. At most
    max_left_over of these requests are decodes, too, which are computed as prompts of one token. is_padded: a step may
    have fewer decodes, but at least one; the missing ones are filled with the padding row.
    """

    num_tokens: int
    num_decodes: int
    num_rows: int
    max_left_over: int = 0
    is_padded: bool = False

    def holds(self, num_decodes: int, num_tokens: int, num_chunks: int) -> bool:
        """Whether a step with this many decodes, prompt tokens and chunks fits this shape."""
        if self.is_padded and num_decodes:
            num_decodes = max(num_decodes, self.num_decodes)
        left_over = num_decodes - self.num_decodes
        return (
            num_decodes + num_tokens <= self.num_tokens
            and 0 <= left_over <= self.max_left_over
            and left_over + num_chunks <= self.num_rows
        )


def holding_shape(
    shapes: Iterable[PromptShape], num_decodes: int, num_tokens: int, num_chunks: int
) -> PromptShape | None:
    """The first shape that such a step fits, if any."""
    return next((shape for shape in shapes if shape.holds(num_decodes, num_tokens, num_chunks)), None)


def prompt_shapes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    most_tokens: int = MOST_MIXED,
    joined_decodes: int = 0,
) -> list[PromptShape]:
    """The shapes of captured steps with prompts, in ascending order of tokens.

    most_tokens: of the largest shape, see captured_prompt_tokens. Steps of prompts are padded to the next of
    TOKEN_COUNTS. If max_num_batched_tokens is small, mixed steps are captured, too: padded to multiples of TILE_TOKENS
    or to max_num_batched_tokens, with a shape for every DECODE_STEP decodes of each size, most decodes first.
    Otherwise `joined_shapes` gives the mixed shapes.
    """
    most = min(max_num_batched_tokens, max_model_len, most_tokens)  # the padding row has no more blocks
    is_mixed = max_num_batched_tokens <= min(MOST_MIXED, max_model_len) and max_model_len <= MAX_MIXED_LEN
    left_over = min(DECODE_STEP - 1, max_num_seqs - 1) if is_mixed else 0
    sizes = {size for size in TOKEN_COUNTS if size <= most}
    tiles = range(TILE_TOKENS, max_num_batched_tokens - LEAST_SAVED + 1, TILE_TOKENS)
    mixed = {max_num_batched_tokens, *tiles} if is_mixed else set()
    joinable = sizes & set(COARSE_JOINED) if most_tokens >= TOKEN_COUNTS[-1] else sizes
    joined = [] if is_mixed else joined_shapes(joinable, max_num_seqs, joined_decodes)

    def _shape(num_tokens: int, num_decodes: int) -> PromptShape:
        return PromptShape(num_tokens, num_decodes, min(MAX_ROWS + left_over, max_num_seqs - num_decodes), left_over)

    def _decode_counts(size: int) -> Iterable[int]:
        return reversed(range(0, min(max_num_seqs, size), DECODE_STEP)) if size in mixed else (0,)

    shapes = [_shape(size, count) for size in sizes | mixed for count in _decode_counts(size)]
    return sorted(shapes + joined, key=lambda shape: shape.num_tokens)


def joined_shapes(sizes: Iterable[int], max_num_seqs: int, joined_decodes: int) -> list[PromptShape]:
    """The shapes of steps in which decodes join prompts, the fewest decodes first.

    sizes: numbers of tokens that they may have. At least half of a step's tokens are for prompts, and of max_num_seqs
    requests MAX_ROWS or half are.
    """
    most = min(joined_decodes, max(max_num_seqs - MAX_ROWS, max_num_seqs // 2))
    counts = sorted({min(count, most) for count in JOINED} - {0})
    return [
        PromptShape(size, count, min(MAX_ROWS, max_num_seqs - count), is_padded=True)
        for size in sorted(sizes)
        for count in counts
        if 2 * count <= size <= MOST_JOINED
    ]


def joining(shapes: Iterable[PromptShape]) -> Joining:
    """The Joining that tells a policy about these shapes."""
    joined = [shape for shape in shapes if shape.is_padded]
    if not joined:
        return Joining()
    max_decodes = max(shape.num_decodes for shape in joined)
    return Joining(
        max_decodes=max_decodes,
        max_prompts=min(shape.num_rows for shape in joined),
        max_prompt_tokens=max(shape.num_tokens for shape in joined) - max_decodes,
    )
