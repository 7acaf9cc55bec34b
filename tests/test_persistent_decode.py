"""The experiment with one kernel for all layers: it computes what plain torch does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tools.persistent_decode import TINY, error


@pytest.mark.slow
def test_one_kernel_for_all_layers_computes_what_plain_torch_does() -> None:
    on_gpu = torch.cuda.is_available()
    device, num_programs = (torch.device("cuda"), 32) if on_gpu else (torch.device("cpu"), 1)
    for context in (1, 37):
        assert error(TINY, device, torch.float32, context, num_programs, 4) < 1e-5
