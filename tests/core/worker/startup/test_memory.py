"""How the memory of a GPU is had while weights are loaded; what else the module does is in tests/core/assembly."""

from __future__ import annotations

import pytest
import torch

from hookline.core.worker.startup.memory import mapped_memory

GPU = torch.device("cuda:0")


@pytest.fixture
def chosen(monkeypatch):
    """What torch's allocator is told."""
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return told


def test_memory_is_mapped_for_weights_alone(chosen):
    with pytest.raises(ValueError), mapped_memory(GPU, 1):
        assert chosen == ["expandable_segments:True"]
        raise ValueError
    assert chosen == ["expandable_segments:True", "expandable_segments:False"]


def test_memory_is_had_as_ever_where_that_is_chosen_or_was_not_measured(chosen, monkeypatch):
    for device, num_ranks in ((torch.device("cpu"), 1), (GPU, 2)):
        with mapped_memory(device, num_ranks):
            pass
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    with mapped_memory(GPU, 1):
        pass
    assert chosen == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    with mapped_memory(GPU, 1):
        pass
