"""What is decided before and while an engine starts: devices, sizes of graphs, memory, text."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.core.assembly.resolve import pick_device, pick_dtype
from hookline.core.assembly.worker import build_worker
from hookline.core.config.settings import EngineConfig
from hookline.core.contracts import AttentionSpec
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CapacityError, ConfigError, RequestError
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.step.captured import graph_sizes
from hookline.core.tokenizer.codec import Codec, as_prompts, prompt_size, snapshot
from hookline.core.worker.startup.memory import allocate_cache, block_bytes, count_blocks

SPEC = AttentionSpec(4, 2, 16, 8, 4, 64, 64, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("limit", [*range(1, 70), 97, 100, 256, 500, 512, 1000, 1024])
def test_every_batch_size_up_to_the_limit_has_a_graph_with_little_padding(limit):
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit
    for count in range(1, limit + 1):
        fitting = next(size for size in sizes if size >= count)
        assert fitting <= max(count * 1.25, count + 15)


def test_block_bytes_counts_keys_and_values_of_all_layers():
    assert block_bytes(3, SPEC) == 2 * 3 * 2 * 16 * 4 * 8


def test_of_values_that_are_a_part_of_the_keys_the_cache_holds_keys_alone():
    latent = replace(SPEC, value_dim=12)
    assert block_bytes(3, latent) == 3 * 2 * 16 * 4 * 8
    assert allocate_cache(3, 5, latent).shape == (1, 3, 6, 8, 2, 16)


def test_a_cpu_cache_takes_its_stated_budget_less_the_scratch_block():
    engine = EngineConfig(cpu_cache_gib=1 / 1024)
    assert count_blocks(engine, 3, SPEC, []) == 2**20 // block_bytes(3, SPEC) - 1
    assert count_blocks(EngineConfig(num_blocks=7), 3, SPEC, []) == 7
    assert count_blocks(EngineConfig(cpu_cache_gib=1e12), 3, SPEC, []) == 2**31 - 1


@pytest.mark.parametrize(("device", "computed"), [("cuda", ["prompts"]), ("cpu", [])])
def test_with_a_stated_number_of_blocks_a_gpu_still_computes_its_largest_step(device, computed):
    done: list[str] = []
    rehearsals = [partial(done.append, "prompts"), partial(done.append, "graphs")]
    spec = replace(SPEC, device=torch.device(device))
    assert count_blocks(EngineConfig(num_blocks=7), 3, spec, rehearsals) == 7
    assert done == computed


def test_a_cache_that_does_not_fit_is_refused_with_the_arithmetic_and_the_keys():
    with pytest.raises(CapacityError) as caught:
        count_blocks(EngineConfig(cpu_cache_gib=1e-6), 3, SPEC, [])
    message = str(caught.value)
    assert "engine.cpu_cache_gib=1e-06" in message and "3 blocks of 8 tokens" in message and "lower" in message


def test_running_out_of_gpu_memory_names_the_allocation_what_is_free_and_the_keys(monkeypatch):
    config = SimpleNamespace(engine=EngineConfig())
    choice = SimpleNamespace(device=torch.device("cuda", 0), config=config, ranks=LocalRanks())

    def fails(choice):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of")

    monkeypatch.setattr("hookline.core.assembly.worker.make_kernels", fails)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2 * 2**30, 80 * 2**30))
    with pytest.raises(CapacityError) as caught:
        build_worker(choice, InstalledExtensions())
    message = str(caught.value)
    assert "Tried to allocate 20.00 GiB" in message and "2.00 of 80.00 GiB are free" in message
    assert "Lower engine.max_num_batched_tokens=16384 or engine.max_num_seqs=512" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_one_tensor_of_zeros_with_a_scratch_block(dtype):
    spec = AttentionSpec(4, 2, 16, 8, 4, 64, 64, torch.device("cpu"), dtype)
    cache = allocate_cache(3, 5, spec)
    assert cache.shape == (2, 3, 6, 8, 2, 16) and cache.dtype is dtype
    assert not cache.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named_with_the_fix():
    with pytest.raises(ConfigError, match="device=cuda: no CUDA device is usable here; use device=cpu"):
        pick_device("cuda")


def test_each_rank_has_a_gpu_of_its_own_and_too_few_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [str(pick_device("auto", LocalRanks(rank, 3))) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert str(pick_device("cuda:1", LocalRanks(1, 2))) == "cuda:2"
    with pytest.raises(ConfigError, match="tp=3 needs as many CUDA devices from cuda:1 on; 3 are here"):
        pick_device("cuda:1", LocalRanks(0, 3))
    with pytest.raises(ConfigError, match="device=cuda:3: only 3 CUDA devices are here"):
        pick_device("cuda:3")


def test_auto_computes_in_float32_on_a_cpu_and_in_the_checkpoints_dtype_on_a_gpu():
    checkpoint = SimpleNamespace(config={"torch_dtype": "torch.float16"})
    assert pick_dtype("auto", checkpoint, torch.device("cpu")) == "float32"
    assert pick_dtype("auto", checkpoint, torch.device("cuda")) == "float16"
    assert pick_dtype("bfloat16", checkpoint, torch.device("cpu")) == "bfloat16"


@pytest.mark.parametrize(
    ("prompts", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), ([{"role": "user", "content": "a"}], 1), ([], 0)],
)
def test_one_prompt_or_several_are_told_apart(prompts, count):
    assert len(as_prompts(prompts)) == count


def test_the_size_of_a_prompt_is_what_there_is_to_encode():
    call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": "b" * 90}]}
    assert prompt_size("a" * 7) == prompt_size(range(7)) == prompt_size(np.arange(7)) == 7
    assert prompt_size([{"role": "user", "content": "a" * 96}]) == 100 and prompt_size([call]) > 100
    assert prompt_size([]) == prompt_size(5) == prompt_size(iter("a")) == 0


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2]), [{"role": "user", "content": [{"text": "a"}]}]])
def test_a_snapshot_stays_as_it_is(prompt):
    taken, before = snapshot(prompt), repr(prompt)
    if isinstance(prompt[0], dict):
        prompt[0]["content"][0]["text"] = prompt[0]["role"] = "b"
    prompt[0] = 3
    assert repr(taken) == before != repr(prompt) and snapshot("ab") == "ab"


def test_without_a_tokenizer_only_token_ids_are_taken():
    codec = Codec(None)
    assert codec.encode([1, 2]) == [1, 2] and codec.decode([1, 2]) == ""
    with pytest.raises(RequestError, match="a text prompt needs a tokenizer"):
        codec.encode("text")
    with pytest.raises(RequestError, match="not int"):
        codec.encode(5)
