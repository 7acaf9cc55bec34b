"""The part of the kernels' conformance suite (suite.py) that is about the rows of requests.

Legend: R rows of requests, N rows of a step, M blocks in a table row, B rows with K drafts each, G tokens of a graph, X
results.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import torch
from torch import Tensor

from hookline.core.contracts import NO_TOKEN, AttentionSpec, DecodeInputs, DraftingRows, RequestRows
from hookline.core.testing.checks import PoisonedMemory, check, check_form, check_unchanged
from hookline.core.testing.kernels_suite.cases import AttentionCases, describe
from hookline.core.testing.plain_kernels import PlainKernels

COLUMNS = (5, 1030)
"""Blocks in a table row."""
VOCAB_SIZE = 150_000


class RequestRowCases(AttentionCases):
    """Tests of how captured decode steps begin and end; inherited plain versions are tested too."""

    def test_gather_decodes(self) -> None:
        """Gather one row and many, some of them the padding row, of a table that is a part of a wider one."""
        for spec in self.specs(self.groups[:1]):
            for num_columns in COLUMNS:
                requests = _requests(spec, num_columns)
                for rows in ([3], _most_rows(spec)):
                    rows_N = torch.tensor(rows, device=spec.device)
                    before = _copied(requests)
                    with PoisonedMemory():
                        actual = self.make(spec).gather_decodes(rows_N, requests)
                    what = f"gather_decodes of {len(rows)} rows of {num_columns} blocks ({describe(spec)})"
                    check(isinstance(actual, DecodeInputs), f"{what} must return DecodeInputs")
                    expected = PlainKernels(None, spec).gather_decodes(rows_N, requests)
                    for name, one, wanted in zip(DecodeInputs._fields, actual, expected, strict=True):
                        check_form(f"{name} of {what}", one, wanted.shape, wanted.dtype)
                        check(one.is_contiguous(), f"{name} of {what} must be contiguous")
                        check(torch.equal(one, wanted), f"{name} of {what} is not what the rows hold")
                    for name, old in before.items():
                        check_unchanged(f"{name}, which gather_decodes was given,", old, getattr(requests, name))

    def test_gather_tokens(self) -> None:
        """Gather tokens of one row and of many, at positions in their first and last blocks."""
        for spec in self.specs(self.groups[:1]):
            for num_columns in COLUMNS:
                requests = _requests(spec, num_columns)
                for rows in ([3], [3, 3, 3, *_most_rows(spec)]):
                    rows_N = torch.tensor(rows, device=spec.device)
                    numbers_N = torch.arange(len(rows), device=spec.device)
                    positions_N = numbers_N * 1009 % (num_columns * spec.block_size)
                    inputs_3N = torch.stack([numbers_N * 5 - 1, positions_N, rows_N])
                    with PoisonedMemory():
                        actual = self.make(spec).gather_tokens(inputs_3N, requests)
                    what = f"gather_tokens of {len(rows)} tokens of {num_columns} blocks ({describe(spec)})"
                    check(isinstance(actual, DecodeInputs), f"{what} must return DecodeInputs")
                    expected = PlainKernels(None, spec).gather_tokens(inputs_3N, requests)
                    for name, one, wanted in zip(DecodeInputs._fields, actual, expected, strict=True):
                        check_form(f"{name} of {what}", one, wanted.shape, wanted.dtype)
                        check(one.is_contiguous(), f"{name} of {what} must be contiguous")
                        check(torch.equal(one, wanted), f"{name} of {what} is not what the rows hold")

    def test_keep_tokens(self) -> None:
        """Write one row and many, with tokens that are a column of results; other rows do not change."""
        for spec in self.specs(self.groups[:1]):
            for rows in ([3], _most_rows(spec)):
                rows_N = torch.tensor(rows, device=spec.device)
                results_N3 = torch.arange(3 * len(rows), device=spec.device).view(-1, 3) * 7
                results_N3[:: max(1, len(rows) // 2), 1] = NO_TOKEN
                draw_position_N = torch.arange(len(rows), device=spec.device) * 5 + 2
                requests, wanted = _requests(spec, COLUMNS[0]), _requests(spec, COLUMNS[0])
                self.make(spec).keep_tokens(rows_N, results_N3[:, 1], draw_position_N, requests)
                PlainKernels(None, spec).keep_tokens(rows_N, results_N3[:, 1], draw_position_N, wanted)
                what = f"keep_tokens of {len(rows)} rows ({describe(spec)})"
                for name in (one.name for one in fields(RequestRows)):
                    actual, expected = getattr(requests, name), getattr(wanted, name)
                    if not isinstance(actual, Tensor):
                        continue
                    if name == "last_token_R":  # the padding row may hold any token
                        actual, expected = actual[:-1], expected[:-1]
                    check(torch.equal(actual, expected), f"{what} leaves {name} other than it should")

    def test_lay_out_drafts(self) -> None:
        """Lay out rows with and without drafts, near their ends and over, the padding row, and room for more."""
        for spec in self.specs(self.groups[:1]):
            for num_drafts, rows, room in _drafting_steps(spec):
                requests, drafting = _requests(spec, COLUMNS[0]), _drafting(spec, None)
                rows_B = torch.tensor(rows, device=spec.device)
                drafts_BK = _drafts(rows_B, num_drafts)
                actual_3G, wanted_3G = (
                    torch.full((3, room), 77, dtype=torch.int64, device=spec.device) for _ in range(2)
                )
                before = _copied(requests)
                self.make(spec).lay_out_drafts(rows_B, drafts_BK, drafting, requests, actual_3G)
                PlainKernels(None, spec).lay_out_drafts(rows_B, drafts_BK, drafting, requests, wanted_3G)
                what = f"lay_out_drafts of {len(rows)} rows with {num_drafts} drafts ({describe(spec)})"
                for name, one, wanted in zip(("tokens", "positions", "rows"), actual_3G, wanted_3G, strict=True):
                    check(torch.equal(one, wanted), f"{what} writes other {name} than it should")
                for name, old in before.items():
                    check_unchanged(f"{name}, which lay_out_drafts was given,", old, getattr(requests, name))

    def test_keep_drafts(self) -> None:
        """Keep drafts that are right, and pretended ones, of the same rows."""
        for spec in self.specs(self.groups[:1]):
            for (num_drafts, rows, room), length in product(_drafting_steps(spec), (None, 1.0, 2.7)):
                rows_B = torch.tensor(rows, device=spec.device)
                inputs_3G = torch.zeros((3, room), dtype=torch.int64, device=spec.device)
                plain, made = PlainKernels(None, spec), self.make(spec)
                plain.lay_out_drafts(
                    rows_B, _drafts(rows_B, num_drafts), _drafting(spec, None), _requests(spec, COLUMNS[0]), inputs_3G
                )
                drawn_G = inputs_3G[0].roll(-1)
                drawn_G[::5] += 1
                drawn_G[-1] = NO_TOKEN
                kept = []
                for kernels in (made, plain):
                    requests, drafting = _requests(spec, COLUMNS[0]), _drafting(spec, length)
                    with PoisonedMemory():
                        results_X = kernels.keep_drafts(rows_B, inputs_3G, drawn_G, num_drafts, drafting, requests)
                    kept.append((results_X, requests, drafting))
                (actual_X, ours, mine), (wanted_X, theirs, other) = kept
                told = "right drafts" if length is None else f"pretended drafts, {length} tokens a step,"
                what = f"keep_drafts of {told} of {len(rows)} rows with {num_drafts} drafts ({describe(spec)})"
                check_form(what, actual_X, wanted_X.shape, wanted_X.dtype)
                count = sum(row != ours.padding_row for row in rows) * (3 + num_drafts)
                check(torch.equal(actual_X[:count], wanted_X[:count]), f"{what} returns other results than it should")
                for name, one, wanted in (
                    ("length_R", ours.length_R, theirs.length_R),
                    ("last_token_R", ours.last_token_R[:-1], theirs.last_token_R[:-1]),
                    ("due_R", mine.due_R[:-1], other.due_R[:-1]),
                ):
                    check(torch.equal(one, wanted), f"{what} leaves {name} other than it should")
                for row in set(rows) - {ours.padding_row}:
                    count = int(theirs.length_R[row])
                    is_equal = torch.equal(mine.tokens_RL[row, :count], other.tokens_RL[row, :count])
                    check(is_equal, f"{what} leaves tokens_RL other than it should")


def _drafting_steps(spec: AttentionSpec) -> list[tuple[int, list[int], int]]:
    """Drafts of each row, the rows, and the tokens that there is room for."""
    return [(1, [3], 2), (3, [5], 7), (4, [*range(9), *[_num_requests(spec)] * 2], 64)]


def _drafts(rows_B: Tensor, num_drafts: int) -> Tensor:
    """Some, few, and none: there may be tokens of no vocabulary among them."""
    numbers_BK = torch.arange(num_drafts, device=rows_B.device) + 11 * rows_B.unsqueeze(1)
    numbers_BK[1::3, -1], numbers_BK[2::3, 0] = -1, VOCAB_SIZE
    return numbers_BK


def _drafting(spec: AttentionSpec, pretended_length: float | None) -> DraftingRows:
    """Of the rows that `_requests` makes: one is over, others have room for as many tokens as their numbers say."""
    requests, num_tokens = _requests(spec, COLUMNS[0]), COLUMNS[0] * spec.block_size + 9
    numbers_R = torch.arange(len(requests.length_R), device=spec.device)
    return DraftingRows(
        torch.zeros((len(numbers_R), num_tokens), dtype=torch.int32, device=spec.device),
        requests.length_R.long() + numbers_R % 7,
        (numbers_R % 4).float() / 4,
        VOCAB_SIZE,
        pretended_length,
    )


def _num_requests(spec: AttentionSpec) -> int:
    """Rows of the tables, the padding row left out."""
    return spec.max_num_seqs + 6


def _most_rows(spec: AttentionSpec) -> list[int]:
    """As many as a step may have, the last three of them the padding row."""
    last = _num_requests(spec)
    return [*range(last - 1, last - spec.max_num_seqs + 2, -1), *[last] * 3]


def _requests(spec: AttentionSpec, num_columns: int) -> RequestRows:
    """Made-up rows: lengths at and around the ends of blocks, and a table that is the first half of a wider one."""
    generator = torch.Generator().manual_seed(3)
    size, device = _num_requests(spec) + 1, spec.device
    length_R = torch.randint(1, num_columns * spec.block_size + 1, (size,), generator=generator)
    length_R[: 2 * spec.block_size] = (torch.arange(size) + 1)[: 2 * spec.block_size]
    length_R[-1] = 1
    wide_RM = torch.randint(0, 5000, (size, 2 * num_columns + 3), generator=generator, dtype=torch.int32).to(device)
    return RequestRows(
        last_token_R=torch.randint(0, 150_000, (size,), generator=generator).to(device),
        length_R=length_R.clamp(max=num_columns * spec.block_size).to(torch.int32).to(device),
        temperature_R=torch.rand(size, generator=generator).to(device),
        seed_R=torch.randint(-(2**62), 2**62, (size,), generator=generator).to(device),
        block_table_RM=wide_RM[:, :num_columns],
        block_size=spec.block_size,
        padding_row=_num_requests(spec),
    )


def _copied(requests: RequestRows) -> dict[str, Tensor]:
    named = {one.name: getattr(requests, one.name) for one in fields(requests)}
    return {name: value.clone() for name, value in named.items() if isinstance(value, Tensor)}
