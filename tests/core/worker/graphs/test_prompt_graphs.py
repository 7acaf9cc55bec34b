"""What a graph with prompts is fed: the step's own tokens, rows and draws as the eager path has them, then padding."""

from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch

from hookline.core.config.settings import EngineConfig
from hookline.core.contracts import Joining
from hookline.core.step.captured import (
    COARSE_JOINED,
    JOINED,
    MAX_MIXED_LEN,
    MAX_ROWS,
    PromptShape,
    captured_prompt_tokens,
    holding_shape,
    joining,
    prompt_shapes,
)
from hookline.core.step.message import Step
from hookline.core.worker.graphs.prompt_graphs import Inputs, PromptGraphs, lay_out, prompt_batch, prompt_sample_rows
from hookline.core.worker.request_table import RequestTable

T, B, SCRATCH = 32, 5, 99
SHAPE = PromptShape(T, 0, B - 1)


def table_and_step():
    """Chunks of table rows 6, 2 and 4: a whole prompt, a middle part that draws nothing, a last token."""
    table = RequestTable(8, max_blocks=10, block_size=4, scratch_block=SCRATCH, device=torch.device("cpu"))
    table.block_table_RM[:8] = torch.randperm(80).view(8, 10).int()
    table.temperature_R[:8] = torch.rand(8)
    table.seed_R[:8] = torch.arange(8)
    step = Step(
        chunk_rows=np.array([6, 2, 4]),
        chunk_starts=np.array([0, 7, 30]),
        chunk_lens=np.array([5, 11, 1]),
        token_ids_T=np.arange(100, 117),
        sampled_chunks=np.array([0, 2]),
        max_context_len=31,
    )
    return table, step


def inputs_of(table, step):
    flat = torch.from_numpy(lay_out(step, SHAPE, table).flat())
    return Inputs.of(flat, SHAPE)


def test_the_steps_own_part_is_what_the_eager_path_computes():
    table, step = table_and_step()
    eager = table.batch(table.receive(step))
    batch = prompt_batch(table, inputs_of(table, step), 0, 40)
    for name in ("token_ids_T", "positions_T", "slot_mapping_T"):
        assert torch.equal(getattr(batch, name)[:17], getattr(eager, name)), name
    assert torch.equal(batch.query_starts_B1[:4], eager.query_starts_B1)
    assert torch.equal(batch.context_lens_B[:3], eager.context_lens_B)
    assert torch.equal(batch.block_table_BM[:3, :8], eager.block_table_BM)
    assert batch.query_starts_B1.dtype == batch.context_lens_B.dtype == torch.int32


def test_draws_are_those_of_the_eager_path_then_the_padding_rows():
    table, step = table_and_step()
    device_step = table.receive(step)
    eager = table.sample_rows(device_step, table.batch(device_step))
    inputs = inputs_of(table, step)
    drawn = prompt_sample_rows(table, inputs)
    assert drawn.rows_N.tolist() == [*eager.rows_N.tolist(), 8, 8]
    assert drawn.token_indices_N[:2].tolist() == eager.token_indices_N.tolist()
    for name in ("temperature_N", "seed_N", "position_N"):
        assert torch.equal(getattr(drawn.params, name)[:2], getattr(eager.params, name)), name


def test_padding_tokens_are_the_last_row_and_write_to_the_scratch_block():
    table, step = table_and_step()
    batch = prompt_batch(table, inputs_of(table, step), 0, 40)
    assert batch.query_starts_B1.tolist() == [0, 5, 16, 17, 17, 32]
    assert batch.context_lens_B.tolist() == [5, 18, 31, 1, 15]
    assert batch.positions_T[17:].tolist() == list(range(15))
    assert (batch.slot_mapping_T[17:] // 4 == SCRATCH).all()


def test_a_step_that_fills_the_graph_leaves_the_padding_row_without_queries():
    table, _ = table_and_step()
    step = Step(
        chunk_rows=np.arange(4), chunk_starts=np.zeros(4, np.int64), chunk_lens=np.full(4, 8), token_ids_T=np.arange(T)
    )
    inputs = inputs_of(table, step)
    batch = prompt_batch(table, inputs, 0, 40)
    assert batch.query_starts_B1.tolist() == [0, 8, 16, 24, 32, 32]
    assert (prompt_sample_rows(table, inputs).rows_N == table.padding_row).all()


@pytest.mark.parametrize("room", [3, 4, 7])
def test_decodes_that_a_padded_step_lacks_are_the_padding_row_and_draw_nothing(room):
    table, step = table_and_mixed_step()
    eager = table.batch(table.receive(step))
    drawn = table.sample_rows(table.receive(step), eager)
    shape = PromptShape(T, room, 4, is_padded=True)
    inputs = Inputs.of(torch.from_numpy(lay_out(step, shape, table).flat()), shape)
    batch = prompt_batch(table, inputs, room, 40)
    assert (batch.num_decodes, batch.num_tokens, batch.num_requests) == (room, T, room + 5)
    own = [0, 1, 2, *range(room, room + 17)]
    for name in ("token_ids_T", "positions_T", "slot_mapping_T"):
        assert torch.equal(getattr(batch, name)[own], getattr(eager, name)), name
    assert batch.positions_T[3:room].tolist() == [0] * (room - 3)
    assert (batch.slot_mapping_T[3:room] // 4 == SCRATCH).all()
    assert batch.context_lens_B[3:room].tolist() == [1] * (room - 3)
    rows = [0, 1, 2, *range(room, room + 3)]
    assert torch.equal(batch.context_lens_B[rows], eager.context_lens_B)
    assert torch.equal(batch.block_table_BM[rows, :8], eager.block_table_BM)
    draws = prompt_sample_rows(table, inputs)
    assert torch.equal(draws.rows_N[:5], drawn.rows_N)
    assert [own.index(index) for index in draws.token_indices_N[:5].tolist()] == drawn.token_indices_N.tolist()
    assert (draws.rows_N[5:] == table.padding_row).all()
    for name in ("temperature_N", "seed_N", "position_N"):
        assert torch.equal(getattr(draws.params, name)[:5], getattr(drawn.params, name)), name


def table_and_mixed_step():
    """The chunks of `table_and_step` beside decodes of rows 7, 0 and 3."""
    table, step = table_and_step()
    table.last_token_R[:8] = torch.arange(200, 208)
    table.length_R[:8] = torch.tensor([9, 1, 1, 21, 1, 1, 1, 17])
    table.host_length_R[:8] = table.length_R[:8].numpy()
    step.decode_rows = np.array([7, 0, 3])
    return table, step


@pytest.mark.parametrize("num_decodes", [0, 1, 2, 3])
def test_a_mixed_step_is_what_the_eager_path_computes_however_many_of_its_decodes_are_decodes(num_decodes):
    table, step = table_and_mixed_step()
    eager = table.batch(table.receive(step))
    drawn = table.sample_rows(table.receive(step), eager)
    shape = PromptShape(T, num_decodes, 7, 3)
    laid_out = lay_out(step, shape, table)
    inputs = Inputs.of(torch.from_numpy(laid_out.flat()), shape)
    batch = prompt_batch(table, inputs, num_decodes, 40)
    assert (batch.num_decodes, batch.num_tokens, batch.num_requests) == (num_decodes, T, num_decodes + 8)
    assert (batch.max_query_len, batch.max_context_len) == (T - num_decodes, 40)
    for name in ("token_ids_T", "positions_T", "slot_mapping_T"):
        assert torch.equal(getattr(batch, name)[:20], getattr(eager, name)), name
    assert torch.equal(batch.query_starts_B1[:7], eager.query_starts_B1)
    assert torch.equal(batch.context_lens_B[:6], eager.context_lens_B)
    assert torch.equal(batch.block_table_BM[:6, :8], eager.block_table_BM)
    draws = prompt_sample_rows(table, inputs)
    assert torch.equal(draws.rows_N[:5], drawn.rows_N)
    assert torch.equal(draws.token_indices_N[:5], drawn.token_indices_N)
    assert (draws.rows_N[5:] == table.padding_row).all()
    for name in ("temperature_N", "seed_N", "position_N"):
        assert torch.equal(getattr(draws.params, name)[:5], getattr(drawn.params, name)), name


def test_small_budgets_are_captured_with_decodes_and_large_ones_without():
    assert prompt_shapes(512, 16384, 4096) == [
        PromptShape(size, 0, 16, 0) for size in (32, 64, 128, 192, 256, 384, 512)
    ]
    shapes = prompt_shapes(100, 300, 4096)
    assert [(shape.num_tokens, shape.num_decodes) for shape in shapes] == [
        (32, 0),
        (64, 0),
        *[(128, count) for count in range(96, -1, -16)],
        (192, 0),
        (256, 0),
        *[(300, count) for count in range(96, -1, -16)],
    ]
    mixed = {budget: {shape.num_tokens for shape in prompt_shapes(100, budget, 4096) if shape.num_decodes}
             for budget in (100, 128, 256, 319, 320, 384, 512)}  # fmt: skip
    assert mixed == {
        100: {100}, 128: {128}, 256: {128, 256}, 319: {128, 319}, 320: {128, 256, 320}, 384: {128, 256, 384},
        512: {128, 256, 384, 512},
    }  # fmt: skip
    assert {shape.num_decodes for shape in prompt_shapes(100, 300, MAX_MIXED_LEN)} == set(range(0, 97, 16))
    for other in (prompt_shapes(100, 300, MAX_MIXED_LEN + 1), prompt_shapes(100, 300, 200)):
        assert {(shape.num_decodes, shape.max_left_over) for shape in other} == {(0, 0)}


def test_the_smaller_the_model_the_larger_are_captured_prompts():
    sizes = {"0.6B": (28, 1024), "4B": (36, 2560), "8B": (36, 4096), "32B": (64, 5120)}
    captured = {name: captured_prompt_tokens(*size, num_ranks=1) for name, size in sizes.items()}
    assert captured == {"0.6B": 4096, "4B": 3072, "8B": 1280, "32B": 512}
    assert captured_prompt_tokens(64, 5120, num_ranks=4) == 1536
    shapes = prompt_shapes(512, 16384, 4096, 1280)
    assert [shape.num_tokens for shape in shapes[-5:]] == [512, 640, 768, 1024, 1280]
    assert {shape.num_decodes for shape in shapes} == {0}
    assert prompt_shapes(512, 16384, 4096, 0) == []


def test_which_steps_are_captured_for_decodes_that_join_prompts():
    shapes = [shape for shape in prompt_shapes(512, 16384, 4096, 1280, 128) if shape.is_padded]
    sizes = {count: [shape.num_tokens for shape in shapes if shape.num_decodes == count] for count in JOINED}
    assert sizes == {
        32: [64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280],
        64: [128, 192, 256, 384, 512, 640, 768, 1024, 1280],
        128: [256, 384, 512, 640, 768, 1024, 1280],
    }
    assert {(shape.num_rows, shape.max_left_over) for shape in shapes} == {(MAX_ROWS, 0)}
    assert EngineConfig().joined_decodes == JOINED[-1]
    assert [shape for shape in prompt_shapes(512, 16384, 4096, 3072, 128) if shape.is_padded] == shapes
    small_model = [shape for shape in prompt_shapes(512, 16384, 4096, 4096, 128) if shape.is_padded]
    assert {shape.num_tokens for shape in small_model} == set(COARSE_JOINED)
    assert not any(shape.is_padded for shape in prompt_shapes(512, 512, 4096, 1280, 128)), "these are mixed anyway"
    alone = [shape for shape in prompt_shapes(512, 16384, 4096, 1280, 128) if not shape.is_padded]
    assert alone == prompt_shapes(512, 16384, 4096, 1280)


@pytest.mark.parametrize(
    ("max_num_seqs", "joined_decodes", "counts"),
    [(512, 128, {32, 64, 128}), (512, 40, {32, 40}), (512, 16, {16}), (512, 0, set()), (64, 128, {32, 48}),
     (40, 128, {24}), (16, 128, {8}), (2, 128, {1}), (1, 128, set())],
)  # fmt: skip
def test_decodes_that_join_leave_prompts_their_rows(max_num_seqs, joined_decodes, counts):
    shapes = prompt_shapes(max_num_seqs, 16384, 4096, 1280, joined_decodes)
    assert {shape.num_decodes for shape in shapes if shape.is_padded} == counts
    assert all(shape.num_decodes + shape.num_rows <= max_num_seqs for shape in shapes)


@pytest.mark.parametrize("max_num_seqs", [512, 64, 40, 16, 2])
@pytest.mark.parametrize("most_tokens", [64, 512, 1280, 4096])
def test_what_a_policy_is_told_of_joining_fits_a_captured_step(max_num_seqs, most_tokens):
    shapes = prompt_shapes(max_num_seqs, 16384, 4096, most_tokens, 128)
    told = joining(shapes)
    for num_decodes, num_prompts, num_tokens in product(
        {1, told.max_decodes}, {1, told.max_prompts}, {told.max_prompts, told.max_prompt_tokens}
    ):
        assert holding_shape(shapes, num_decodes, num_tokens, num_prompts).is_padded
        assert told.pays(num_decodes, num_prompts, num_tokens)
    assert not holding_shape(shapes, told.max_decodes + 1, 1, 1)
    assert not holding_shape(shapes, 1, told.max_prompts + 1, told.max_prompts + 1)


def test_a_policy_is_told_of_no_joining_where_nothing_is_captured_for_it():
    assert (
        joining([])
        == joining(prompt_shapes(512, 16384, 4096, 1280))
        == joining(prompt_shapes(512, 512, 4096))
        == Joining()
    )


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 32), (16, 16), (16, 32), (20, 32), (128, 128), (512, 512)])
def test_no_shape_draws_for_more_than_may_run(max_num_seqs, budget):
    shapes = prompt_shapes(max_num_seqs, budget, 4096)
    assert all(0 < shape.num_rows <= max_num_seqs - shape.num_decodes for shape in shapes)
    assert all(shape.num_decodes < shape.num_tokens <= budget for shape in shapes)


@pytest.mark.parametrize("num_decodes", [0, 1, 15, 16, 31, 96])
@pytest.mark.parametrize("num_tokens", [1, 40, 200])
def test_a_mixed_step_takes_the_graph_with_most_of_its_decodes(num_decodes, num_tokens):
    shape = holding_shape(prompt_shapes(100, 300, 4096), num_decodes, num_tokens, 3)
    assert shape.num_decodes == num_decodes // 16 * 16 and shape.num_tokens >= num_decodes + num_tokens


def held(**step):
    """Which graph a step takes, of those for at most 100 requests and 300 tokens."""
    sections = {"chunk_rows": np.arange(3), "token_ids_T": np.arange(40), "decode_rows": np.arange(20)}
    graphs = PromptGraphs(cast(Any, None), prompt_shapes(100, 300, 4096), 4096)
    return graphs.shape(Step(**{**sections, **step}))


def test_which_graph_a_step_takes():
    assert held() == PromptShape(128, 16, 31, 15)
    assert held(token_ids_T=np.arange(140)) == PromptShape(300, 16, 31, 15)
    assert held(decode_rows=np.arange(2)) == PromptShape(64, 0, 31, 15)
    assert held(token_ids_T=np.arange(280)) and not held(token_ids_T=np.arange(281))
    assert held(chunk_rows=np.arange(27)) and not held(chunk_rows=np.arange(28))
    assert held(decode_rows=np.arange(97), chunk_rows=np.arange(3))
    assert not held(decode_rows=np.arange(97), chunk_rows=np.arange(4)), "that would be 101 requests"


@pytest.mark.parametrize("step", [{"chunk_rows": np.arange(0)}, {"reads": np.arange(8)}], ids=str)
def test_steps_without_prompts_or_with_those_whose_states_are_asked_for_take_none(step):
    assert held(**step) is None


@pytest.mark.parametrize("step", [{"forbidden_draws": np.arange(1)}, {"extensions": 1}, {"num_logprobs": 0}], ids=str)
def test_draws_that_are_not_plain_take_the_same_graphs(step):
    assert held(**step) == held()
