"""Layers that keep unlike things: a batch for each group, in eager and in captured steps, and states in rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.core.assembly.rank_parts import make_states
from hookline.core.contracts import (
    WHOLE_MODEL,
    AttentionSpec,
    Batch,
    FullAttention,
    ModelSpec,
    NoCache,
    RecurrentState,
    SharedCache,
    SlidingWindow,
    StateTensor,
)
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError, StepFault
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.step.captured import PromptShape
from hookline.core.step.message import Step
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.worker.graphs.decode_graphs import decode_step
from hookline.core.worker.graphs.prompt_graphs import Inputs, lay_out, prompt_batch
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.runner.attention import PagedAttention, grouped_attention
from hookline.core.worker.startup.memory import allocate_cache, block_bytes, count_blocks

CPU = torch.device("cpu")
SIZES = AttentionSpec(2, 1, 4, 4, 8, 64, 40, CPU, torch.float32)
STATES = RecurrentState((("mean", StateTensor((6, 4), split_dim=0)), ("tail", StateTensor((3,), "float64"))))
LAYERS = (FullAttention(), SlidingWindow(6), STATES, SharedCache(1), NoCache(), STATES)
SPEC = ModelSpec(6, 2, 1, 4, 8, 50, 40, LAYERS)
GROUPS = CacheGroups.of(SPEC, 40)


def resolved(num_ranks=1):
    return SimpleNamespace(spec=SPEC, attention=SIZES, ranks=LocalRanks(0, num_ranks), stage=WHOLE_MODEL)


@pytest.fixture
def table():
    """Eight rows whose blocks are scattered, two groups of ten columns each."""
    table = RequestTable(8, 10, 4, 99, CPU, windows=GROUPS.windows, states=make_states(resolved()))
    table.block_table_RM[:8] = torch.randperm(160).view(8, 20).int()
    table.length_R[:8] = torch.arange(20, 28, dtype=torch.int32)
    table.host_length_R[:8] = np.arange(20, 28)
    return table


def mixed_step():
    return Step(
        decode_rows=np.array([3, 5]),
        chunk_rows=np.array([6, 2]),
        chunk_starts=np.array([0, 7]),
        chunk_lens=np.array([5, 11]),
        token_ids_T=np.arange(16),
        sampled_chunks=np.array([0, 1]),
        max_context_len=26,
    )


def slots(table, group, row, positions):
    blocks = table.block_table_RM[row, 10 * group : 10 * group + 10].tolist()
    return [blocks[position // 4] * 4 + position % 4 for position in positions]


def check_batches(table, batch, rows, spans):
    """rows: of the table. spans: the positions of each row's tokens, in the order of the batch."""
    assert [batch.window, *(one.window for one in batch.others)] == [None, 6]
    assert batch.rows_B[: len(rows)].tolist() == rows
    for group, one in enumerate([batch, *batch.others]):
        wanted = [slot for row, span in zip(rows, spans, strict=True) for slot in slots(table, group, row, span)]
        assert one.slot_mapping_T[: len(wanted)].tolist() == wanted
        for index, row in enumerate(rows):
            width = one.block_table_BM.shape[1]
            assert torch.equal(one.block_table_BM[index], table.block_table_RM[row, 10 * group : 10 * group + width])
        assert one.positions_T is batch.positions_T
    assert batch.scratch is not batch.others[0].scratch


SPANS = [[22], [24], range(5), range(7, 18)]


def test_each_group_has_its_own_blocks_and_slots_in_an_eager_step(table):
    batch = table.batch(table.receive(mixed_step()))
    check_batches(table, batch, [3, 5, 6, 2], SPANS)
    assert batch.block_table_BM.shape[1] == 7


def test_each_group_has_its_own_blocks_and_slots_in_a_captured_decode(table):
    runner = SimpleNamespace(table=table, kernels=PlainKernels(None, SIZES))
    batch, _ = decode_step(runner, torch.tensor([3, 5, 8]), 40)
    check_batches(table, batch, [3, 5], SPANS[:2])


def test_each_group_has_its_own_blocks_and_slots_in_a_captured_step_with_prompts(table):
    shape = PromptShape(32, 2, 4)
    flat = torch.from_numpy(lay_out(mixed_step(), shape, table).flat())
    batch = prompt_batch(table, Inputs.of(flat, shape), 2, 40)
    check_batches(table, batch, [3, 5, 6, 2], SPANS)
    assert (batch.others[0].slot_mapping_T[18:] // 4 == 99).all()  # padding writes to the scratch block


def test_a_request_that_is_admitted_begins_with_zeros_and_the_others_keep_their_states(table):
    for named in table.states.layers.values():
        for tensor in named.values():
            tensor.fill_(7)
    admit = {"admit_seeds": np.zeros(2, dtype=np.int64), "admit_temperatures": np.zeros(2, dtype=np.int64)}
    table.receive(Step(admit_rows=np.array([6, 1]), **admit))
    assert list(table.states.layers) == [2, 5]
    for named in table.states.layers.values():
        assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {"mean": (9, 6, 4), "tail": (9, 3)}
        assert [named["tail"].dtype, named["mean"].dtype] == [torch.float64, torch.float32]
        for tensor in named.values():
            is_zero = [bool((row == 0).all()) for row in tensor]
            assert is_zero == [row in (1, 6) for row in range(9)]


def test_each_rank_keeps_its_part_of_a_state_and_refuses_one_that_cannot_be_split():
    named = make_states(resolved(2)).layers[2]
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {"mean": (9, 3, 4), "tail": (9, 3)}
    with pytest.raises(
        ConfigError, match=r"tp=4 does not divide dimension 0 of the state 'mean' of layer 2, .*\(6, 4\)"
    ):
        make_states(resolved(4))


class NotesPreparing(PlainKernels):
    def __init__(self):
        super().__init__(None, SIZES)
        self.prepared = []

    def prepare(self, batch):
        self.prepared.append(batch.window)


@pytest.fixture
def attend(table):
    batch = table.batch(table.receive(mixed_step()))
    cache = allocate_cache(GROUPS.num_places, 160, SIZES)
    kernels = NotesPreparing()
    return grouped_attention(kernels, list(cache.unbind(1)), GROUPS, batch, None, [0], table.states)


def test_a_model_learns_whose_tokens_a_step_has_and_which_sequences_begin(attend, table):
    rows = attend.states(5)
    assert rows.tensors is table.states.layers[5]
    assert rows.rows_B.tolist() == [3, 5, 6, 2]
    assert rows.is_new_B.tolist() == [False, False, True, False]
    assert rows.query_starts_B1.tolist() == [0, 1, 2, 7, 18]
    assert (rows.num_decodes, rows.max_query_len) == (2, 11)


def test_a_layer_that_shares_a_cache_reads_it_and_writes_nothing(attend):
    qkv_TC = torch.randn(18, 16)
    written = attend(1, qkv_TC.clone(), None)
    before = [kv.clone() for kv in attend.kv_places]
    shared = attend(3, qkv_TC[:, :8].clone(), None)
    assert torch.equal(shared, written)
    assert all(torch.equal(kv, one) for kv, one in zip(attend.kv_places, before, strict=True))


def test_layers_of_different_groups_write_to_the_same_place_of_different_blocks(attend, table):
    attend(0, torch.ones(18, 16), None)
    attend(1, torch.full((18, 16), 2.0), None)
    (kv_2NSKE,) = attend.kv_places
    for group, value in ((0, 1), (1, 2)):
        for row, span in zip((3, 5, 6, 2), SPANS, strict=True):
            found = kv_2NSKE.flatten(1, 2)[:, slots(table, group, row, span)]
            assert (found == value).all()


@pytest.mark.slow
def test_no_step_of_groups_or_states_waits_for_the_device(table):
    cache, kernels = allocate_cache(GROUPS.num_places, 160, SIZES), PlainKernels(None, SIZES)
    shape, rows_G, qkv_TC = PromptShape(32, 2, 4), torch.tensor([3, 5, 8]), torch.randn(3, 16)
    inputs = Inputs.of(torch.from_numpy(lay_out(mixed_step(), shape, table).flat()), shape)
    with torch.no_grad(), no_host_sync("a step", but=("hookline.core.testing.plain_kernels",)):
        table.states.clear(rows_G)
        prompt_batch(table, inputs, 2, 40)
        batch, _ = decode_step(SimpleNamespace(table=table, kernels=kernels), rows_G, 40)
        attend = grouped_attention(kernels, list(cache.unbind(1)), GROUPS, batch, None, [0], table.states)
        attend(1, qkv_TC, None)
        attend(3, qkv_TC[:, :8], None)
        attend.states(5).tensors["mean"].index_copy_(0, rows_G, torch.ones(3, 6, 4))


def test_each_group_is_prepared_once_a_step_however_many_layers_it_has(attend):
    for layer in (0, 1, 3):
        attend(layer, torch.randn(18, 8 if layer == 3 else 16), None)
    assert attend.kernels.prepared == [None, 6]


def test_a_model_with_full_attention_everywhere_has_one_batch_and_no_states():
    table = RequestTable(8, 10, 4, 99, CPU)
    batch = table.batch(table.receive(mixed_step()))
    assert type(batch) is Batch and batch.window is None
    assert table.group_tables[0].data_ptr() == table.block_table_RM.data_ptr()
    with pytest.raises(StepFault, match="the state of layer 1, which keeps none"):
        PagedAttention(PlainKernels(None, SIZES), [], batch).states(1)


def test_what_a_spec_does_not_say_is_refused_by_layer(attend):
    with pytest.raises(StepFault, match=r"calls attend for layer 4, which has no keys and values by its spec\.layers"):
        attend(4, torch.randn(18, 16), None)
    with pytest.raises(StepFault, match=r"asks for the state of layer 0, which keeps none by its spec\.layers"):
        attend.states(0)


def test_blocks_are_as_large_as_one_group_and_there_are_more_of_them():
    engine = SimpleNamespace(num_blocks=None, cpu_cache_gib=1.0)
    counts = [count_blocks(engine, num_layers, SIZES, []) for num_layers in (6, 1)]
    assert block_bytes(6, SIZES) == 6 * block_bytes(1, SIZES)
    assert (counts[1] + 1) // (counts[0] + 1) == 6


def test_a_model_without_keys_and_values_has_blocks_that_take_no_memory():
    engine = SimpleNamespace(num_blocks=None, cpu_cache_gib=1.0)
    num_blocks = count_blocks(engine, 0, SIZES, [])
    assert num_blocks == 2 * 8 * 10, "policies keep a part of the blocks free"
    assert allocate_cache(0, num_blocks, SIZES).numel() == 0
