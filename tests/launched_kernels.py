"""Says which variants of Triton kernels steps launch that an engine had not launched when it was ready.

A process of its own, since it pretends to have a card, and since the suite runs Triton's interpreter.
Questions (tests/asked_script.py): how many random steps, and the arguments of `python -m core.run`.
"""

from __future__ import annotations

import importlib
import json
import random
from typing import Any

import numpy as np
import torch

from hookline.core.config.compose import compose
from hookline.core.contracts import AttentionSpec
from hookline.core.plugin.host import PluginHost
from hookline.core.prebuild.dry_run import dry_worker
from hookline.core.prebuild.pretended import CARDS, pretended
from hookline.core.run.settings import RunKeys, validate_run
from hookline.core.step.message import Step
from tests.asked_script import answer_all

IMPORTED = ("torch._dynamo", "hookline.plugins.kernels.triton_backend")
"""Takes seconds to import, which each answer would do."""


def random_step(random: random.Random, spec: AttentionSpec, row: int, *, shares: bool) -> Step:
    """Some decodes, some prompts or parts of them, anywhere in their contexts, within the limits.

    shares: whether decodes may share a prefix.
    """
    num_decodes = random.choice([0, 0, 1, 2, 3, random.randrange(spec.max_num_seqs)])
    left, longest = spec.max_num_batched_tokens - num_decodes, random.choice([4, 64, 512, 4096, 16384])
    lens: list[int] = []
    for _ in range(min(random.choice([0, 1, 1, 2, random.randrange(1, 40)]), spec.max_num_seqs - num_decodes)):
        if left - sum(lens) > 0:
            lens.append(min(random.randrange(1, longest + 1), left - sum(lens), spec.max_model_len))
    lens = lens or [1] * (not num_decodes)
    starts = [random.choice([0, random.randrange(spec.max_model_len - one + 1)]) for one in lens]
    contexts = [random.randrange(1, spec.max_model_len)] * bool(num_decodes)
    return Step(
        decode_rows=np.full(num_decodes, row),
        chunk_rows=np.full(len(lens), row),
        chunk_starts=np.array(starts, dtype=np.int64),
        chunk_lens=np.array(lens, dtype=np.int64),
        token_ids_T=np.zeros(sum(lens), dtype=np.int64),
        sampled_chunks=np.array([one for one in range(len(lens)) if random.random() < 0.7], dtype=np.int64),
        max_context_len=max(contexts + [start + one for start, one in zip(starts, lens, strict=True)]),
        all_greedy=random.random() < 0.3,
        shared_len=spec.block_size if shares and num_decodes > 1 and random.random() < 0.3 else 0,
    )


def launched_late(num_steps: int, arguments: list[str]) -> dict[str, Any]:
    """How many variants were launched before ready, and by name those that came later."""
    host, launched, generator = PluginHost.load(), list[str](), random.Random(0)
    config = validate_run(compose(arguments, host, RunKeys)[0].tree, host).config

    def seen(kernel: Any, specialization: str) -> None:
        launched.append(f"{kernel.__name__} {json.loads(specialization)['key']}")

    with pretended(CARDS["h200"], seen), torch.inference_mode():
        worker, resolved = dry_worker(config, host)
        num_ready = len(launched)
        for _ in range(num_steps):
            row, shares = worker.table.padding_row, resolved.shares_prefixes
            worker.launch(random_step(generator, resolved.attention, row, shares=shares))
    return {"ready": num_ready, "late": launched[num_ready:]}


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    answer_all(launched_late)
