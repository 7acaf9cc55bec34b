"""The torch kernels against the conformance suite, also with blocks of one token and of 256."""

from __future__ import annotations

from dataclasses import replace

import torch

from hookline.core.contracts import ATTENTION_FEATURES, AttentionSpec
from hookline.core.testing.kernels_suite import KernelsSuite
from hookline.plugins.kernels.torch_reference import TorchKernels


class TestTorchKernels(KernelsSuite):
    graph_safe = False
    attention = ATTENTION_FEATURES
    kv_dtypes = (torch.float8_e4m3fn,)
    groups = (1, 4)

    def make(self, spec: AttentionSpec) -> TorchKernels:
        return TorchKernels(None, spec)


class TestTorchKernelsWithSmallAndLargeBlocks(KernelsSuite):
    graph_safe = False
    attention = ATTENTION_FEATURES
    kv_dtypes = (torch.float8_e4m3fn,)
    block_sizes = (1, 256)
    head_dims = (16,)
    groups = (2,)

    def make(self, spec: AttentionSpec) -> TorchKernels:
        return TorchKernels(None, spec)


class TestTorchKernelsWithManyGroups(KernelsSuite):
    graph_safe = False
    attention = ATTENTION_FEATURES
    kv_dtypes = (torch.float8_e4m3fn,)
    block_sizes = (8,)
    head_dims = (32,)
    groups = (8,)
    max_num_seqs, max_num_batched_tokens, max_model_len = 36, 71, 416

    def make(self, spec: AttentionSpec) -> TorchKernels:
        return TorchKernels(None, spec)


class TestTorchKernelsInBatchInvariantMode(KernelsSuite):
    graph_safe = False
    attention = ATTENTION_FEATURES
    kv_dtypes = (torch.float8_e4m3fn,)
    batch_invariant = True
    max_num_seqs, max_num_batched_tokens, max_model_len = 36, 71, 416
    block_sizes = (16,)
    head_dims = (32,)
    groups = (2,)

    def make(self, spec: AttentionSpec) -> TorchKernels:
        return TorchKernels(None, replace(spec, batch_invariant=True))
