"""What a prefill graph is fed: the step's own tokens, rows and draws as the eager path lays them out, then padding."""

import numpy as np
import torch

from core.prefill_graphs import Inputs, lay_out, prefill_batch, prefill_draws
from core.state import RequestTable
from core.step import Step

T, B, SCRATCH = 32, 5, 99


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
    flat = torch.from_numpy(lay_out(step, T, B, table.padding_row).flat())
    return Inputs.of(flat, T, B)


def test_the_steps_own_part_is_what_the_eager_path_computes():
    table, step = table_and_step()
    eager = table.batch(table.receive(step))
    batch = prefill_batch(table, inputs_of(table, step), 40)
    for name in ("token_ids_T", "positions_T", "slot_mapping_T"):
        assert torch.equal(getattr(batch, name)[:17], getattr(eager, name)), name
    assert torch.equal(batch.query_starts_B1[:4], eager.query_starts_B1)
    assert torch.equal(batch.context_lens_B[:3], eager.context_lens_B)
    assert torch.equal(batch.block_table_BM[:3, :8], eager.block_table_BM)
    assert batch.query_starts_B1.dtype == batch.context_lens_B.dtype == torch.int32


def test_draws_are_those_of_the_eager_path_then_the_padding_rows():
    table, step = table_and_step()
    device_step = table.receive(step)
    eager = table.draws(device_step, table.batch(device_step))
    drawn = prefill_draws(table, inputs_of(table, step))
    assert drawn.rows_N.tolist() == [*eager.rows_N.tolist(), 8, 8]
    assert drawn.token_indices_N[:2].tolist() == eager.token_indices_N.tolist()
    for name in ("temperature_N", "seed_N", "position_N"):
        assert torch.equal(getattr(drawn.params, name)[:2], getattr(eager.params, name)), name


def test_padding_tokens_are_the_last_row_and_write_to_the_scratch_block():
    table, step = table_and_step()
    batch = prefill_batch(table, inputs_of(table, step), 40)
    assert batch.query_starts_B1.tolist() == [0, 5, 16, 17, 17, 32]
    assert batch.context_lens_B.tolist() == [5, 18, 31, 1, 15]
    assert batch.positions_T[17:].tolist() == list(range(15))
    assert (batch.slot_mapping_T[17:] // 4 == SCRATCH).all()


def test_a_step_that_fills_the_graph_leaves_the_padding_row_without_queries():
    table, _ = table_and_step()
    step = Step(
        chunk_rows=np.arange(4), chunk_starts=np.zeros(4, np.int64), chunk_lens=np.full(4, 8), token_ids_T=np.arange(T)
    )
    batch = prefill_batch(table, inputs_of(table, step), 40)
    assert batch.query_starts_B1.tolist() == [0, 8, 16, 24, 32, 32]
    assert (prefill_draws(table, inputs_of(table, step)).rows_N == table.padding_row).all()
