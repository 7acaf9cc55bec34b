"""What the plugin says where it cannot run; and on a card, Hookline's conformance suite and a captured step."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hookline_flashinfer import FlashInferConfig

from hookline.core.contracts import AttentionSpec
from hookline.core.errors import ConfigError, PluginError
from hookline.core.testing.batches import make_batch, random_cache, scatter_rows
from hookline.core.testing.checks import check_close
from hookline.core.testing.installed import installed_config, installed_kernels
from hookline.core.testing.kernels_suite import KernelsSuite
from hookline.core.testing.plain_kernels import PlainKernels

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="needs a CUDA device and flashinfer",
)


def test_on_a_cpu_it_is_refused_with_its_reasons() -> None:
    with pytest.raises(PluginError, match=r"kernels 'flashinfer' of plugin .*device is cpu, needs cuda"):
        installed_kernels("flashinfer", dtype="bfloat16")


def test_where_it_cannot_run_auto_passes_it_over() -> None:
    assert installed_kernels("auto") != "flashinfer"


def test_an_empty_workspace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.workspace_mib=0 must be at least 1"):
        installed_config(kernels={"name": "flashinfer", "workspace_mib": 0})


@needs_gpu
class TestFlashInfer(KernelsSuite):
    dtypes = (torch.bfloat16,)
    head_dims = (128,)
    device = "cuda"

    def make(self, spec: AttentionSpec):
        from hookline_flashinfer.kernels import FlashInferKernels

        return FlashInferKernels(FlashInferConfig(workspace_mib=64), spec)


@needs_gpu
def test_a_captured_decode_follows_the_lengths_on_the_device() -> None:
    from dataclasses import replace

    from hookline_flashinfer.kernels import FlashInferKernels

    spec = AttentionSpec(16, 8, 128, 16, 64, 1024, 1024, torch.device("cuda"), torch.bfloat16)
    kernels = FlashInferKernels(FlashInferConfig(workspace_mib=64), spec)
    rows = scatter_rows([(600, 1), (1, 1), (33, 1), (400, 1)], 16, 120, seed=0)
    batch = make_batch(rows, spec, num_decodes=4)
    cache = random_cache(spec, 120, seed=1)[:, 0]
    q_THE = torch.randn(4, 16, 128, device="cuda", dtype=torch.bfloat16)
    expected = PlainKernels(None, spec).attend(q_THE, cache, batch)
    lengths = batch.context_lens_B.clone()
    captured = replace(batch, context_lens_host=None, max_context_len=1024)

    def step() -> torch.Tensor:
        kernels.prepare(captured)
        return kernels.attend(q_THE, cache, captured)

    captured.context_lens_B.fill_(1)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    captured.context_lens_B.copy_(lengths)
    graph.replay()
    check_close("a replayed step", out, expected, 2e-2)
