"""The conformance suite of poolers: subclass it in your tests and return your pooler from `make`.

Legend: as in core/contracts/pooler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import PooledChunks, Pooler, PoolerSpec
from hookline.core.plugin.check_contract import POOLER_TASKS
from hookline.core.testing.checks import check, check_close, check_contract, check_form, check_unchanged
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.plain_pooler import fake_spec

LENGTHS = (1, 7, 3, 24)
"""Lengths of the suite's prompts, in tokens."""


class PoolerSuite:
    """`class TestMine(PoolerSuite): def make(self, spec): return Mine(MyConfig(), spec)`.

    hidden_size, device, hf_config: of the spec. Override `expected` to have vectors compared with expected ones;
    tolerance is for sums in float32 in another order.
    """

    hidden_size: ClassVar[int] = 16
    device: ClassVar[str] = "cpu"
    hf_config: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-5

    def make(self, spec: PoolerSpec) -> Any:
        """The pooler under test."""
        raise NotImplementedError("return your pooler from make()")

    def expected(self, hidden_TD: Tensor) -> Tensor | None:
        """The vector (F,) of a prompt with these hidden states, in float64; None compares with nothing."""
        return None

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("pooler", type(self._made()))

    def test_vectors_have_their_form(self) -> None:
        """float32, one row for each prompt; an embedding has as many numbers as a hidden state."""
        pooler, prompts = self._made(), self._prompts()
        tasks = ", ".join(POOLER_TASKS)
        check(pooler.task in POOLER_TASKS, f"its task is {pooler.task!r} and must be one of {tasks}")
        vectors_BF: Any = self._pooled(pooler, prompts)
        width = vectors_BF.shape[1] if isinstance(vectors_BF, Tensor) and vectors_BF.ndim == 2 else 0
        width = {"embed": self.hidden_size, "score": 1}.get(pooler.task, width)
        check_form("what finish returns", vectors_BF, (len(prompts), width), torch.float32)
        check(bool(vectors_BF.isfinite().all()), "what finish returns holds NaN or infinity")

    def test_vectors_are_what_is_expected(self) -> None:
        """Compared with `expected` unless it returns None, also for hidden states in bfloat16."""
        for dtype in (torch.float32, torch.bfloat16):
            prompts = [hidden_TD.to(dtype) for hidden_TD in self._prompts()]
            vectors_BF = self._pooled(self._made(), prompts)
            for hidden_TD, vector_F in zip(prompts, vectors_BF, strict=True):
                expected_F = self.expected(hidden_TD.double())
                if expected_F is not None:
                    check_close(f"a vector of {len(hidden_TD)} tokens", vector_F, expected_F.float(), self.tolerance)

    def test_pieces_make_no_difference(self) -> None:
        """A prompt may come in any pieces, with pieces of other prompts in between."""
        prompts = self._prompts()
        whole_BF = self._pooled(self._made(), prompts)
        for size in (1, 2, 5):
            found_BF = self._pooled(self._made(), prompts, size)
            check_close(f"a vector that came in pieces of {size} tokens", found_BF, whole_BF, self.tolerance)

    def test_a_prompt_does_not_depend_on_its_neighbours(self) -> None:
        """Alone, in a crowd, and after others have been through the same pooler."""
        prompts, pooler = self._prompts(), self._made()
        crowd_BF = self._pooled(pooler, prompts)
        for index, hidden_TD in enumerate(prompts):
            alone_1F = self._pooled(pooler, [hidden_TD])
            check_close("a vector of a prompt alone", alone_1F, crowd_BF[index : index + 1], self.tolerance)

    def test_hidden_states_are_left_as_they_are(self) -> None:
        """Others read them after the pooler."""
        pooler, chunks = self._made(), self._chunks([0] * len(LENGTHS), LENGTHS)
        hidden_TD, chunks = self._picked(pooler, torch.cat(self._prompts()), chunks)
        kept_TD = hidden_TD.clone()
        pooler.accumulate(self._state(pooler, len(LENGTHS)), hidden_TD, chunks)
        check_unchanged("hidden_TD", kept_TD, hidden_TD)

    def test_pooling_never_waits_for_the_host(self) -> None:
        """The next step is launched meanwhile."""
        pooler = self._made()
        hidden_TD, chunks = self._picked(pooler, torch.cat(self._prompts()), self._chunks([0] * len(LENGTHS), LENGTHS))
        state_BS, lens_B = self._state(pooler, len(LENGTHS)), torch.tensor(LENGTHS, device=self.device)
        pooler.finish(pooler.accumulate(state_BS.clone(), hidden_TD, chunks), lens_B)  # the first call may compile
        with torch.no_grad(), no_host_sync("accumulate"):
            state_BS = pooler.accumulate(state_BS, hidden_TD, chunks)
        with torch.no_grad(), no_host_sync("finish"):
            pooler.finish(state_BS, lens_B)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _made(self) -> Pooler:
        pooler: Pooler = self.make(fake_spec(self.hidden_size, self.hf_config, self.device))
        return pooler

    def _prompts(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = self.hidden_size
        return [(torch.randn(length, shape, generator=generator) + 0.5).to(self.device) for length in LENGTHS]

    def _state(self, pooler: Pooler, count: int) -> Tensor:
        return torch.zeros(count, pooler.state_size(), device=self.device)

    def _chunks(self, positions: Sequence[int], lens: Sequence[int]) -> PooledChunks:
        lens_B = torch.tensor(lens, device=self.device)
        chunk_of_T = torch.repeat_interleave(torch.arange(len(lens), device=self.device), lens_B)
        starts_B = lens_B.cumsum(0) - lens_B
        shift_B = torch.tensor(positions, device=self.device) - starts_B
        positions_T = torch.arange(len(chunk_of_T), device=self.device) + shift_B[chunk_of_T]
        return PooledChunks(starts_B, lens_B, chunk_of_T, positions_T)

    def _picked(self, pooler: Pooler, hidden_TD: Tensor, chunks: PooledChunks) -> tuple[Tensor, PooledChunks]:
        """The pieces as core hands them to this pooler: a prompt's last token alone, if it does not read all."""
        if pooler.reads_all_tokens:
            return hidden_TD, chunks
        last_B = chunks.starts_B + chunks.lens_B - 1
        return hidden_TD[last_B], self._chunks(chunks.positions_T[last_B].tolist(), [1] * len(last_B))

    def _pooled(self, pooler: Pooler, prompts: Sequence[Tensor], size: int | None = None) -> Tensor:
        """The vectors of prompts that come in pieces of this size, a piece of each prompt in one call."""
        state_BS = self._state(pooler, len(prompts))
        longest = max(map(len, prompts))
        for start in range(0, longest, size or longest):
            inside = [index for index, one in enumerate(prompts) if start < len(one)]
            pieces = [prompts[index][start : start + (size or longest)] for index in inside]
            if not pooler.reads_all_tokens:
                ending = [
                    place for place, index in enumerate(inside) if start + len(pieces[place]) == len(prompts[index])
                ]
                inside, pieces = [inside[place] for place in ending], [pieces[place] for place in ending]
            if inside:
                chunks = self._chunks([start] * len(inside), [len(piece) for piece in pieces])
                hidden_TD, chunks = self._picked(pooler, torch.cat(pieces), chunks)
                found = pooler.accumulate(state_BS[inside].clone(), hidden_TD, chunks)
                check_form("what accumulate returns", found, (len(inside), state_BS.shape[1]), torch.float32)
                state_BS[inside] = found
        return pooler.finish(state_BS, torch.tensor([len(one) for one in prompts], device=self.device))
