"""The conformance suite of drafters: subclass it in your tests and return your drafter from `make`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hookline.core.contracts import ComputedRow, DrafterSpec, DraftRow, is_offered
from hookline.core.testing.checks import check, check_contract

MOST = (1, 3, 64)
"""Numbers of drafts that the suite asks for."""


class DrafterSuite:
    """`class TestMine(DrafterSuite): def make(self, spec): return Mine(MyConfig(), spec)`.

    A drafter that fails never changes a token, but its requests get no drafts. copies: whether it drafts the rest of a
    text that the request repeats. vocab_size: as in the spec. layers, hidden_size: for a drafter that has `observe`,
    the layers whose hidden states it gets and their size; `make` then gives it a spec with a target.
    """

    vocab_size: ClassVar[int] = 97
    copies: ClassVar[bool] = False
    layers: ClassVar[Sequence[int]] = ()
    hidden_size: ClassVar[int] = 1

    def make(self, spec: DrafterSpec) -> Any:
        """The drafter under test."""
        raise NotImplementedError("return your drafter from make()")

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("drafter", type(self._made()))

    def test_says_how_many_drafts_it_makes_at_most(self) -> None:
        """`k` is a whole number of at least 1, and `adaptive` a bool."""
        drafter = self._made()
        check(type(drafter.k) is int and drafter.k >= 1, f"its k is {drafter.k!r} and must be an int of at least 1")
        check(type(drafter.adaptive) is bool, f"its adaptive is {drafter.adaptive!r} and must be a bool")

    def test_proposes_token_ids_and_no_more_than_asked_for(self) -> None:
        """At most num_drafts ids of the vocabulary, for requests from one token on."""
        drafter = self._made()
        self._show(drafter, self._rows())
        for row in self._rows():
            drafts = np.asarray(drafter.propose(row))
            asked = f"asked for {row.num_drafts} drafts after {len(row.tokens)} tokens"
            check(drafts.ndim == 1, f"{asked}, propose returned no flat sequence")
            check(len(drafts) <= row.num_drafts, f"{asked}, propose returned {len(drafts)}")
            if len(drafts):
                check(drafts.dtype.kind in "iu", f"{asked}, propose returned {drafts.dtype} and not whole numbers")
                is_inside = bool(((drafts >= 0) & (drafts < self.vocab_size)).all())
                check(is_inside, f"{asked}, propose returned ids outside of 0 to {self.vocab_size - 1}")

    def test_proposes_for_many_requests_what_it_proposes_for_each(self) -> None:
        """With `propose_all`: one proposal for each request, in the order of the requests."""
        if not is_offered(type(self._made()).propose_all):
            return
        rows, drafter = self._rows(), self._made()
        self._show(drafter, rows)
        together = [list(drafts) for drafts in drafter.propose_all(rows)]
        check(len(together) == len(rows), f"propose_all returned {len(together)} proposals for {len(rows)} requests")
        drafter = self._made()
        self._show(drafter, rows)
        for row, drafts in zip(rows, together, strict=True):
            alone = list(drafter.propose(row))
            check(drafts == alone, f"propose_all returned {drafts} for a request, for which propose returned {alone}")

    def test_hidden_states_that_it_had_before_change_nothing(self) -> None:
        """With `observe`: the hidden states of a preempted request come again, also after drafts were made."""
        if not is_offered(type(self._made()).observe):
            return
        drafter, rows = self._made(), self._rows()
        self._show(drafter, rows)
        before = [list(drafter.propose(row)) for row in rows]
        check(any(before), "shown the hidden states of all tokens, it proposed nothing for any request")
        self._show(drafter, rows, first=1)
        for row, drafts in zip(rows, before, strict=True):
            again = list(drafter.propose(row))
            check(again == drafts, f"shown the same hidden states again, it proposed {again} in place of {drafts}")

    def test_leaves_the_tokens_alone(self) -> None:
        """`propose` must not write to a request's tokens."""
        drafter = self._made()
        for row in self._rows():
            tokens = row.tokens.copy()
            writable = DraftRow(row.id, tokens, row.num_prompt_tokens, row.num_drafts)
            drafter.propose(writable)
            check(np.array_equal(tokens, row.tokens), "propose wrote to the tokens of its request")

    def test_forgets_requests_that_it_never_saw(self) -> None:
        """A request may end before any drafts were proposed for it."""
        drafter = self._made()
        drafter.forget(12345)
        for row in self._rows():
            drafter.propose(row)
            drafter.forget(row.id)

    def test_copies_what_the_request_repeats(self) -> None:
        """With `copies`: after a text and its beginning once more, it drafts the continuation of the text."""
        if not self.copies:
            return
        text = np.arange(40, dtype=np.int32) * 7 % self.vocab_size
        tokens = np.concatenate([text, text[:20]])
        drafter = self._made()
        drafts = list(drafter.propose(DraftRow(0, tokens, len(tokens), min(4, drafter.k))))
        wanted = text[20 : 20 + min(4, drafter.k)].tolist()
        check(drafts == wanted, f"after a text that began again it drafted {drafts}, and the text goes on {wanted}")

    def test_drafts_on_the_device(self) -> None:
        """With `propose_on_device`: as many numbers as asked for, of which those that are no tokens come last; with
        `copies`, the continuation of the text.
        """
        if not is_offered(type(self._made()).propose_on_device):
            return
        import torch

        text = np.arange(40, dtype=np.int32) * 7 % self.vocab_size
        texts = [row.tokens for row in self._rows()] + [np.concatenate([text, text[:20]])]
        tokens_RL = torch.zeros((len(texts), 300), dtype=torch.int32)
        for row, tokens in enumerate(texts):
            tokens_RL[row, : len(tokens)] = torch.from_numpy(tokens.copy())
        rows_B = torch.arange(len(texts)).flip(0)
        lengths_B = torch.tensor([len(text) for text in texts[::-1]], dtype=torch.int32)
        given = [one.clone() for one in (tokens_RL, rows_B, lengths_B)]
        for num_drafts in range(1, self._made().k + 1):
            drafts_BK = self._made().propose_on_device(tokens_RL, rows_B, lengths_B, num_drafts)
            shape, asked = (len(texts), num_drafts), f"asked for {num_drafts} drafts of {len(texts)} requests,"
            is_sound = isinstance(drafts_BK, torch.Tensor) and drafts_BK.dtype == torch.int64
            check(is_sound, f"{asked} propose_on_device returned no tensor of int64")
            found = tuple(drafts_BK.shape)
            check(found == shape, f"{asked} propose_on_device returned shape {found}, not {shape}")
            check(bool((drafts_BK < self.vocab_size).all()), f"propose_on_device returned ids beyond {self.vocab_size}")
            is_gap = (drafts_BK[:, :-1] < 0) & (drafts_BK[:, 1:] >= 0)
            check(not bool(is_gap.any()), "propose_on_device returned a draft behind one that is missing")
            for name, one, before in zip(
                ("tokens", "rows", "lengths"), (tokens_RL, rows_B, lengths_B), given, strict=True
            ):
                check(torch.equal(one, before), f"propose_on_device wrote to the {name} that it was given")
            drafts, wanted = drafts_BK[0].tolist(), text[20 : 20 + num_drafts].tolist()
            is_copied = not self.copies or drafts == wanted
            check(is_copied, f"after a text that began again it drafted {drafts} on the device, not {wanted}")

    def _made(self) -> Any:
        return self.make(DrafterSpec(self.vocab_size, max_num_seqs=32, max_model_len=300))

    def _show(self, drafter: Any, rows: Sequence[DraftRow], first: int = 0) -> None:
        """Pass hidden states of these requests' tokens to `observe`: from position `first` on, without the newest."""
        if is_offered(type(drafter).observe):
            rng = np.random.default_rng(1)
            sizes = [(len(row.tokens) - 1, self.hidden_size) for row in rows]
            states = [{layer: rng.standard_normal(size, np.float32) for layer in self.layers} for size in sizes]
            drafter.observe(
                [
                    ComputedRow(row.id, row.tokens, first, {layer: one[first:] for layer, one in streams.items()})
                    for row, streams in zip(rows, states, strict=True)
                    if len(row.tokens) - 1 > first
                ]
            )

    def _rows(self) -> list[DraftRow]:
        rng, rows = np.random.default_rng(0), list[DraftRow]()
        for length in (1, 2, 3, 17, 200):
            for vocab_size in (2, self.vocab_size):
                for most in MOST:
                    tokens = rng.integers(0, vocab_size, length, dtype=np.int32)
                    tokens.setflags(write=False)
                    rows.append(DraftRow(len(rows), tokens, max(1, length // 2), most))
        return rows
