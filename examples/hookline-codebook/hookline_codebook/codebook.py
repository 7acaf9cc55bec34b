"""Weights as codes: each is a byte that names one of up to 256 values, and every linear has values of its own.

Stored are `X.codes` (outputs, inputs) uint8 and `X.codebook` (values,). Legend: O outputs, D inputs of a rank,
V values of a codebook, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import (
    MatrixPiece,
    MatrixPlace,
    Quantization,
    QuantizedMatrix,
    Scheme,
    StoredForm,
    WeightTarget,
)
from hookline.core.errors import CheckpointError, ConfigError, shown

SCHEME = Scheme("codebook", 0, 0, multiplies=True)


@dataclass(frozen=True, eq=False)
class CodebookMatrix(QuantizedMatrix):
    """codes (O, D), or (X, O, D); book_of_O (O,): which row of books_BV has a row's values; of experts (X, O)."""

    codes: Tensor
    books_BV: Tensor
    book_of_O: Tensor
    scheme: Scheme = SCHEME

    @property
    def num_rows(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_columns(self) -> int:
        return self.codes.shape[-1]

    @property
    def num_experts(self) -> int | None:
        return len(self.codes) if self.codes.ndim == 3 else None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        places = self.book_of_O.unsqueeze(-1) * self.books_BV.shape[1] + self.codes
        return self.books_BV.flatten()[places].to(dtype)

    def linear(self, x_TD: Tensor) -> Tensor:
        return functional.linear(x_TD, self.dequantised(x_TD.dtype))

    def of_expert(self, index: int) -> CodebookMatrix:
        return replace(self, codes=self.codes[index], book_of_O=self.book_of_O[index])


class CodebookLoading:
    """Codes lie as the matrix does; each piece brings a codebook, which all its rows share."""

    scheme = SCHEME

    def __init__(self, num_values: int, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> None:
        self.pieces, lead = pieces, () if place.num_experts is None else (place.num_experts,)
        self.codes = torch.zeros((*lead, place.num_rows, place.num_columns), dtype=torch.uint8, device=place.device)
        self.book_of_O = torch.zeros((*lead, place.num_rows), dtype=torch.long, device=place.device)
        self.books_BV = torch.zeros(len(pieces), num_values, device=place.device)

    def targets(self) -> Mapping[str, WeightTarget]:
        targets = {}
        for book, piece in enumerate(self.pieces):
            rows = slice(piece.row, piece.row + piece.rows.size)
            index: Any = rows if piece.expert is None else (piece.expert, rows)
            self.book_of_O[index] = book
            shape = piece.rows.total, piece.columns.total
            codes, books = (f"{piece.name}.{suffix}" for suffix in ("codes", "codebook"))
            write = partial(self._write_codes, codes, piece, self.codes[index])
            targets[codes] = WeightTarget.converted(self.codes, shape, write, ("U8",))
            write = partial(self._write_book, books, self.books_BV[book])
            targets[books] = WeightTarget.converted(self.books_BV, self.books_BV.shape[1:], write)
        return targets

    def loaded(self) -> CodebookMatrix:
        return CodebookMatrix(self.codes, self.books_BV, self.book_of_O)

    def _write_codes(self, name: str, piece: MatrixPiece, view: Tensor, whole: Any) -> None:
        found = whole[piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop]
        if found.numel() and int(found.max()) >= self.books_BV.shape[1]:
            raise CheckpointError(f"tensor {name} has code {int(found.max())}, beyond {self.books_BV.shape[1]} values")
        view.copy_(found)

    def _write_book(self, name: str, view: Tensor, whole: Any) -> None:
        view.copy_(whole[...])
        if not bool(view.isfinite().all()):
            raise CheckpointError(f"tensor {name} has NaN or infinity among its values; copy the checkpoint again")


class Codebook(Quantization):
    """Reads quant_method codebook, which states num_values, and modules_to_not_convert."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        stated = form.stated or {}
        self.num_values, self.left = stated.get("num_values", 16), stated.get("modules_to_not_convert", ["lm_head"])
        if type(self.num_values) is not int or not 2 <= self.num_values <= 256:
            raise ConfigError(f"quantization_config.num_values = {shown(self.num_values)}; it must be from 2 to 256")

    def stores(self, name: str) -> Scheme | None:
        return None if any(f".{one}." in f".{name}." for one in self.left) else SCHEME

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> CodebookLoading:
        return CodebookLoading(self.num_values, pieces, place)
