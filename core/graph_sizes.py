"""Which steps are captured as CUDA graphs, and how far they are padded. No torch, no graphs."""

from __future__ import annotations

from dataclasses import dataclass

TOKEN_COUNTS = (32, 64, 128, 192, 256, 384, 512)
"""Tokens of captured steps with prompts; larger ones keep the card busy for longer than the host launches them."""
MAX_ROWS = 16
"""Most requests of a captured step besides its decodes."""
DECODE_STEP = 16
"""Decodes of captured steps with prompts are multiples of it; those left over are computed as prompts of one token."""
MAX_LEFT_OVER_CONTEXT = 16_384
"""Most tokens of a context of such a step: prompts of one token read theirs one after the other."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture: every batch up to max_num_seqs fits one, with at most a quarter of padding from 32 on."""
    sizes = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, max_num_seqs}
    step, size = 16, 80
    while size <= max_num_seqs:
        sizes.add(size)
        step = max(16, size // 8 // 16 * 16)
        size += step
    return sorted(size for size in sizes if size <= max_num_seqs)


@dataclass(frozen=True)
class PromptShape:
    """A captured step with prompts: its tokens, as many of them as are decodes, and rows for the rest of it.

    The first num_decodes tokens are decodes; the others are those of num_rows requests, and of a padding row. At most
    max_left_over of these requests are decodes, too.
    """

    num_tokens: int
    num_decodes: int
    num_rows: int
    max_left_over: int = 0

    def holds(self, num_decodes: int, num_tokens: int, num_chunks: int, max_context_len: int = 0) -> bool:
        """Whether it can be a step of so many decodes and so many prompt tokens, in so many chunks.

        max_context_len: as of Step.
        """
        left_over = num_decodes - self.num_decodes
        return (
            num_decodes + num_tokens <= self.num_tokens
            and 0 <= left_over <= self.max_left_over
            and left_over + num_chunks <= self.num_rows
            and (not left_over or max_context_len <= MAX_LEFT_OVER_CONTEXT)
        )


def prompt_shapes(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[PromptShape]:
    """The captured steps with prompts, those of fewest tokens first, and of these those of most decodes.

    Steps of prompts alone are padded to the next of TOKEN_COUNTS. A mixed step fills up max_num_batched_tokens as long
    as prompts wait, so if that is small, it is captured with each number of decodes.
    """
    rows = min(MAX_ROWS, max_num_seqs)
    most = min(max_num_batched_tokens, max_model_len)  # the padding row has no more blocks
    shapes = [PromptShape(size, 0, rows) for size in TOKEN_COUNTS if size <= most]
    if max_num_batched_tokens <= min(TOKEN_COUNTS[-1], max_model_len):
        left_over = min(DECODE_STEP - 1, max_num_seqs)
        counts = range(0, min(max_num_seqs, max_num_batched_tokens - 1) + 1, DECODE_STEP)
        mixed = (PromptShape(max_num_batched_tokens, count, rows + left_over, left_over) for count in reversed(counts))
        shapes = [shape for shape in shapes if shape.num_tokens < max_num_batched_tokens] + list(mixed)
    return shapes
