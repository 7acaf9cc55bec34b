"""The part of the kernels' conformance suite (suite.py) that is about the rows of requests.

Legend: R rows of requests, N rows of a step, M blocks in a table row.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from hookline.core.contracts import NO_TOKEN, AttentionSpec, DecodeInputs, RequestRows
from hookline.core.testing.checks import PoisonedMemory, check, check_form, check_unchanged
from hookline.core.testing.kernels_suite.cases import AttentionCases, describe
from hookline.core.testing.plain_kernels import PlainKernels

COLUMNS = (5, 1030)
"""Blocks in a table row."""


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
