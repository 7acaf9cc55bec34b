"""Stages of a fake model over fake links: what each does in which order, and what comes out.

The model adds one to a token in each stage, and draws the sum: after S stages, token t is followed by t + S.
"""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, ExtensionSpec, Stage, wanted_rows
from hookline.core.errors import EngineError, RequestFault
from hookline.core.layers import tapped_stream
from hookline.core.step.executor import read_by, tapped_after
from hookline.core.step.message import Step
from hookline.core.step.micro_batches import cut
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.testing.plain_sampler import PlainSampler
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.runner.model_runner import ModelRunner
from hookline.core.worker.runner.step_extensions import RankExtensions
from hookline.core.worker.runner.token_masks import token_masks
from hookline.core.worker.stages.reads import PartReads, StageReads
from hookline.core.worker.stages.returned_tokens import ReturnedTokens
from hookline.core.worker.stages.worker import StageWorker
from tests.replayed_at_once import replay_at_once

VOCAB = 100
ROWS = 6
SPEC = AttentionSpec(1, 1, 4, 4, ROWS, 64, 32, torch.device("cpu"), torch.float32)
Events = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


class AddsOne:
    def __init__(self, stage: Stage, events: Events) -> None:
        self.stage, self.events = stage, events

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Any) -> Tensor:
        self.events.append(("compute", self.stage.index, len(token_ids_T)))
        stream_TD = token_ids_T.float().unsqueeze(1) if self.stage.is_first else attend.stream_TD
        rows_N = wanted_rows(attend)
        found_ND = (stream_TD if rows_N is None else stream_TD[rows_N]) + 1
        tapped_stream(self.stage.index, found_ND, attend)
        return found_ND

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return 50 * torch.nn.functional.one_hot(hidden_ND[:, 0].long() % VOCAB, VOCAB).float()


class FakeLinks:
    """What one stage sends is in a queue for the next; to wait for what was not sent is an error."""

    def __init__(self, stage: Stage, queues: dict[Any, deque[Tensor]], events: Events) -> None:
        self.stage, self.queues, self.events = stage, queues, events
        self.posted: deque[Tensor] = deque()

    def send(self, x: Tensor) -> None:
        self.events.append(("send", self.stage.index))
        self.queues[self.stage.index].append(x.clone())

    def receive(self, x: Tensor) -> None:
        x.copy_(self.queues[self.stage.index - 1].popleft())

    def send_back(self, x: Tensor) -> None:
        self.events.append(("send back",))
        self.queues["back"].append(x.clone())

    def receive_back(self, x: Tensor) -> Any:
        self.events.append(("post",))
        self.posted.append(x)

        def arrive() -> None:
            self.events.append(("await",))
            while any(one is x for one in self.posted):  # they are filled in the order in which they were posted
                self.posted.popleft().copy_(self.queues["back"].popleft())

        return arrive

    def on_host(self, x: Tensor) -> Tensor:
        return x

    def end_part(self) -> None:
        pass


def make_workers(size: int, taps: tuple[int, ...] = ()) -> tuple[list[StageWorker], Events]:
    events: Events = []
    queues: dict[Any, deque[Tensor]] = {name: deque() for name in ("back", *range(size))}
    workers = []
    for index in range(size):
        stage = Stage(index, size, index, index + 1)
        table = RequestTable(ROWS, 8, SPEC.block_size, 0, SPEC.device)
        kv_cache = torch.zeros(2, 1, 4, SPEC.block_size, 1, 4)
        model = cast(Any, AddsOne(stage, events))
        sampler = cast(Any, PlainSampler(None))
        kernels = PlainKernels(None, SPEC)
        late = token_masks(VOCAB, kernels, SPEC.device)
        runner = ModelRunner(model, kernels, sampler, table, kv_cache, vocab_size=VOCAB, first_layer=index, late=late)
        if taps:
            sizes = ExtensionSpec(ROWS + 1, VOCAB, SPEC.max_model_len, SPEC.device, num_layers=size)
            runner.extensions = RankExtensions([], sizes, own_layers=range(index, index + 1), taps=taps)
        links = FakeLinks(stage, queues, events)
        behind = {tapped_after(layer): layer for layer in sorted(taps) if layer}
        workers.append(StageWorker(runner, stage, cast(Any, links), SPEC, 1, is_host=index == 0, kept=behind))
    return workers, events


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def prompts(*lens: int, sampled: Any = None) -> Step:
    """Rows 0, 1, … with prompts of so many tokens; the last token of row r is 10 * (r + 1)."""
    rows = np.arange(len(lens))
    tokens = [token for row, count in enumerate(lens) for token in [1] * (count - 1) + [10 * (row + 1)]]
    return Step(
        admit_rows=rows,
        admit_seeds=rows,
        admit_temperatures=np.zeros(len(lens), dtype=np.int64),
        chunk_rows=rows,
        chunk_starts=np.zeros(len(lens), dtype=np.int64),
        chunk_lens=ints(*lens),
        token_ids_T=ints(*tokens),
        sampled_chunks=rows if sampled is None else sampled,
        max_context_len=max(lens),
    )


def decodes(*rows: int) -> Step:
    return Step(decode_rows=ints(*rows), max_context_len=8)


def compute(workers: list[StageWorker], step: Step) -> list[int]:
    handle = workers[0].launch(step)
    for worker in workers[1:]:
        worker.launch(step)
    return cast(list[int], workers[0].collect(handle).tokens.tolist())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_pass_all_stages_and_come_back_in_the_order_of_the_step(size):
    workers, _ = make_workers(size)
    assert compute(workers, prompts(3, 1, 5, 2)) == [10 + size, 20 + size, 30 + size, 40 + size]
    assert compute(workers, decodes(2, 0, 3)) == [30 + 2 * size, 10 + 2 * size, 40 + 2 * size]
    assert compute(workers, decodes(0)) == [10 + 3 * size]
    for worker in workers:
        assert worker.table.length_R[:4].tolist() == [6, 2, 7, 4], "all stages count the same tokens"
        assert worker.table.host_length_R[:4].tolist() == [6, 2, 7, 4]


def test_a_stage_computes_its_next_micro_batch_while_the_next_stage_has_the_one_before():
    workers, events = make_workers(3)
    first, second = prompts(2, 2, 2, 2, 2, 2), decodes(0, 1, 2, 3, 4, 5)
    handle = workers[0].launch(first)
    assert events == [*[("compute", 0, 4), ("send", 0)] * 3, *[("post",)] * 3], "nobody else has begun"
    for worker in workers[1:]:
        worker.launch(first)
    events.clear()
    workers[0].launch(second)  # before the first step is collected, as with engine.overlap
    assert events == [*[("await",), ("compute", 0, 2), ("send", 0)] * 3, *[("post",)] * 3], "tokens come late"
    assert workers[0].collect(handle).tokens.tolist() == [13, 23, 33, 43, 53, 63]
    assert events.count(("await",)) == 3, "what the next step waited for is not waited for again"


def test_tokens_that_no_request_reads_any_more_are_waited_for_by_nobody_but_the_host():
    workers, events = make_workers(2)
    first = prompts(1, 1)
    handle = workers[0].launch(first)
    workers[1].launch(first)
    events.clear()
    again = workers[0].launch(decodes(0))
    assert events[0] == ("await",) and events.count(("await",)) == 1, "row 1 is in the other micro-batch"
    workers[1].launch(decodes(0))
    assert workers[0].collect(handle).tokens.tolist() == [12, 22]
    assert workers[0].collect(again).tokens.tolist() == [14]


def test_a_row_taken_over_reads_the_new_requests_token_and_not_a_late_one_of_the_old():
    workers, _ = make_workers(2)
    compute(workers, prompts(1, 1))
    late = workers[0].launch(decodes(0, 1))
    workers[1].launch(decodes(0, 1))
    assert compute(workers, prompts(4)) == [12]
    assert compute(workers, decodes(0)) == [14]
    assert workers[0].collect(late).tokens.tolist() == [14, 24]


def test_chunks_that_draw_nothing_send_nothing_back():
    workers, events = make_workers(2)
    assert compute(workers, prompts(4, 4, sampled=ints())) == []
    assert ("post",) not in events and ("send back",) not in events
    assert compute(workers, prompts(4, 4, sampled=ints(1))) == [22]


def test_scored_prompts_of_all_micro_batches_come_back_apart_from_the_draws():
    workers, _ = make_workers(2)
    step = prompts(3, 2)
    step.reads, step.read_lens, step.read_values = ints(0, 0, 0, 0, 1, 0, 0, 0), ints(2, 1), ints(7, 8, 9)
    handle = workers[0].launch(step)
    workers[1].launch(step)
    result = workers[0].collect(handle)
    assert result.tokens.tolist() == [12, 22]
    assert result.apart[read_by(0)].view(np.int32)[:, 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize(("late", "expected"), [([0, 2], [3, 24, 37]), ([2], [14, 24, 3])], ids=str)
def test_masked_draws_wait_on_the_last_stage_and_all_stages_count_them_afterwards(late, expected):
    workers, events = make_workers(2)
    compute(workers, prompts(1, 1, 1))
    step = decodes(0, 1, 2)
    step.late_draws = ints(*late)  # those of one micro-batch, or of both
    events.clear()
    handle, behind = (worker.launch(step) for worker in workers)
    assert handle.tokens is None and ("send back",) not in events
    assert all(worker.table.length_R[:3].tolist() == [2, 2, 2] for worker in workers)
    for worker in workers:
        masks = worker.late_rows(2)
        masks[:] = 0
        masks[0, 0], masks[1, 1] = 1 << 3, 1 << 5  # only token 3, and only token 37
    workers[0].release(handle, len(late))
    workers[1].release(behind, len(late))
    assert workers[0].collect(handle).tokens.tolist() == expected
    assert all(worker.table.length_R[:3].tolist() == [3, 3, 3] for worker in workers)


def test_what_fails_for_one_request_in_the_last_stages_draw_ends_the_engine_by_name(monkeypatch):
    workers, _ = make_workers(2)
    workers[0].launch(prompts(1))

    def fails(*_: Any) -> Any:
        raise RequestFault("processor 'x' fails", rows=[0])

    monkeypatch.setattr(workers[1], "_draw_all", fails)
    with pytest.raises(EngineError, match="processor 'x' fails") as raised:
        workers[1].launch(prompts(1))
    assert not isinstance(raised.value, RequestFault)


def test_captured_parts_compute_what_single_launches_do():
    workers, _ = make_workers(2)
    compute(workers, prompts(1, 1, 1))
    rows_G, graphs = (
        torch.tensor([0, 2, ROWS]),
        [worker._make_graphs(SPEC, shares_prefixes=False) for worker in workers],
    )
    assert graphs[0].sizes == [1, 2, 3] and graphs[0].stream_GD is None and graphs[1].stream_GD.shape == (3, 1)
    workers[0].returned.await_rows(ints(0, 2))
    graphs[1].stream_GD.copy_(graphs[0].step(rows_G))
    assert graphs[1].step(rows_G).tolist()[:2] == [14, 34]
    assert workers[1].table.length_R[[0, 2, ROWS]].tolist() == [3, 3, 1]


class ReadsNothing:
    """Readers of chunks that are done nothing with."""

    def groups(self, step: Step) -> list[Any]:
        return [SimpleNamespace(tokens=ints(step.num_tokens - 1))]

    def read_last(self, groups: Any) -> bool:
        return True

    def run(self, groups: Any, hidden_PD: Tensor, *, is_whole: bool) -> dict[str, Tensor]:
        return {}


def test_captured_parts_beside_pooled_chunks_draw_from_their_own_hidden_states(monkeypatch):
    replay_at_once(monkeypatch)
    workers, _ = make_workers(3)
    compute(workers, prompts(1, 1, 1))
    for worker in workers:
        stream_GD = None if worker.stage.is_first else torch.zeros(2, 1)
        worker.graphs = DecodeGraphs(worker.runner, [1, 2], 32, stage=worker.stage, stream_GD=stream_GD)
        worker.graphs.capture(None)
        worker._reads = cast(Any, SimpleNamespace(end_step=lambda *told: {}))
        worker.runner.readers = cast(Any, ReadsNothing())
    step = replace(
        prompts(1, sampled=ints()),
        decode_rows=ints(0, 1, 2),
        chunk_rows=ints(3),
        reads=ints(0, 8, 3, 0),
        read_lens=ints(0),
        num_plugin_reads=1,
        admit_rows=ints(3),
    )
    assert [len(part.step.decode_rows) for part in cut(step, 3)] == [1, 1, 1]
    assert compute(workers, step) == [16, 26, 36]
    assert compute(workers, decodes(0, 1, 2)) == [19, 29, 39]


def test_a_stage_rehearses_and_warms_up_by_itself():
    workers, events = make_workers(3)
    for worker in workers:
        worker.profile_run(SPEC)
        worker.profile_graphs(SPEC, [])
        worker.warm_up(SPEC, shares_prefixes=False)
    assert {event[0] for event in events} == {"compute"}
    assert compute(workers, prompts(2, 1)) == [13, 23]


def test_a_rehearsal_is_checked_as_first_steps_are():
    workers, _ = make_workers(2)
    for worker in workers:
        worker.runner.checks.hidden = lambda *told: 1 / 0
        with pytest.raises(ZeroDivisionError):
            worker.profile_run(SPEC)


# ------------------------------------------------------------------------------------- hidden states and pooled vectors


def make_links(size: int) -> list[FakeLinks]:
    queues: dict[Any, deque[Tensor]] = {name: deque() for name in ("back", *range(size))}
    return [FakeLinks(Stage(index, size, index, index + 1), queues, []) for index in range(size)]


def returned_to(links: FakeLinks) -> ReturnedTokens:
    return ReturnedTokens(RequestTable(ROWS, 8, SPEC.block_size, 0, SPEC.device), links, is_host=True)


def test_hidden_states_of_all_stages_come_to_the_first_in_the_order_of_the_step():
    workers, _ = make_workers(4, taps=(3, 0, 1))
    for worker in workers:
        worker.profile_run(SPEC)
    step = prompts(3, 5, 2)
    assert len(cut(step, 4)) == 3
    handles = [worker.launch(step) for worker in workers]
    found = {name: rows.wait() for name, rows in handles[0].apart.items()}
    assert all(not handle.apart for handle in handles[1:])
    assert list(found) == [tapped_after(layer) for layer in (0, 1, 3)]
    for layer, rows_T1 in zip((0, 1, 3), found.values(), strict=True):
        assert rows_T1[:, 0].tolist() == (step.token_ids_T + layer + 1).tolist()
    assert compute(workers, decodes(1, 0)) == [28, 18]
    mixed = replace(prompts(2), decode_rows=ints(0, 1), chunk_rows=ints(2), admit_rows=ints(2), max_context_len=8)
    handles = [worker.launch(mixed) for worker in workers]
    assert workers[0].collect(handles[0]).apart[tapped_after(1)][:, 0].tolist() == [18 + 2, 28 + 2, 1 + 2, 10 + 2]


def read_on(links: list[FakeLinks], parts: list[PartReads]) -> list[Any]:
    """What comes of it on each stage, the first one first: the last one is asked before the others, as it says it."""
    found: dict[int, Any] = {}
    for one in (links[-1], *links[:-1]):
        returned = returned_to(one) if one.stage.is_first else None
        own = parts if one.stage.is_last else []
        try:
            found[one.stage.index] = StageReads(one.stage, one, SPEC.device).end_step(own, returned)
        except RequestFault as fault:
            found[one.stage.index] = fault
    assert not any(one.queues[name] for one in links for name in range(len(links))), "nobody receives it"
    return [found[index] for index in range(len(links))]


def test_vectors_of_all_micro_batches_come_to_the_first_stage_in_the_order_of_their_chunks():
    wide, narrow, last = torch.ones(1, 4), torch.full((1, 2), 2.0), torch.full((2, 2), 3.0)
    parts = [PartReads({"narrow": narrow}), PartReads({"wide": wide, "narrow": last}), PartReads()]
    first, *others = read_on(make_links(3), parts)
    found = {name: rows.wait().tolist() for name, rows in first.items()}
    assert found == {"narrow": [[2.0] * 2, [3.0] * 2, [3.0] * 2], "wide": [[1.0] * 4]}
    assert others == [{}, {}]


def test_a_pooler_that_fails_on_the_last_stage_fails_on_all_of_them_with_the_same_rows():
    fault = RequestFault("pooler 'bad' fails: no", rows=[1])
    found = read_on(make_links(3), [PartReads({"wide": torch.ones(1, 4)}), PartReads(fault=fault)])
    assert [str(one) for one in found] == ["pooler 'bad' fails: no"] * 3
    assert [one.rows for one in found] == [{1}] * 3
