"""tools/fit_kernels.py: it passes kernels that fit their card, and fails where one asks for more than there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fit_kernels import LATENT, MODELS, PLAN, QUANTISED, WIDE_HEADS, Fits, overrides_of, report

HERE = Path(__file__).resolve().parents[1]
LAUNCH = """
import os
import torch
from hookline.plugins.kernels.products import triton_row_product as invariant
from hookline.plugins.kernels.products import triton_product

def tensor(*sizes):
    return torch.empty(sizes, dtype=torch.bfloat16, device="cuda")

def launch():
    assert not os.listdir(os.environ["TRITON_CACHE_DIR"]), "kernels that were compiled before are read"
    invariant.row_product(tensor(16, 2048), tensor(12288, 2048), None, silu=True)
    kind, x_TD, weight_OD = triton_product.Kind.PLAIN, tensor(64, 2048), tensor(2560, 2048)
    tiling = triton_product.fitting_tiling(kind, x_TD, weight_OD)
    if tiling is not None:
        triton_product.product(kind, x_TD, weight_OD, None, tiling)
"""
TOO_LARGE = """
invariant.fitting_row_tile = lambda tile, num_weights, card: tile
"""


def run(tmp_path, text, *cards):
    """What the tool says of a file that launches kernels, and its exit code."""
    pytest.importorskip("triton")
    (tmp_path / "launches.py").write_text(text)
    (tmp_path / "cache" / "A_KERNEL_COMPILED_BEFORE").mkdir(parents=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, HERE / "tools" / "fit_kernels.py", "--of", tmp_path / "launches.py", "--processes", "1"]
    named = [word for card in cards for word in ("--card", card)]
    done = subprocess.run([*command, *named], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_products_of_width_2048_and_batch_invariant_ones_fit_an_rtx_4090_and_an_rtx_5090(tmp_path):
    code, lines, error = run(tmp_path, LAUNCH, "rtx4090", "rtx5090")
    assert code == 0, (lines, error)
    assert [line.split()[:4] for line in lines[1:3]] == [["rtx4090", "8.9", "1", "1"], ["rtx5090", "12.0", "2", "2"]]
    assert all(0 < int(line.split()[4].replace(",", "")) <= 101_376 for line in lines[1:3])


@pytest.mark.slow
def test_a_kernel_that_asks_for_more_than_its_card_has_fails_the_check(tmp_path):
    code, lines, error = run(tmp_path, LAUNCH + TOO_LARGE, "rtx4090")
    assert code == 1, (lines, error)
    assert lines[2].startswith("rtx4090 has 101,376: _row_product_kernel asks for 129,024 bytes of shared memory (")


def test_kernels_that_do_not_compile_or_fit_are_told_with_their_card(capsys):
    assert report([Fits("a100", 2, 2, (9, "_a"))]) == 0
    assert report([Fits("a100"), Fits("rtx3090", over=["_b asks for 200,000 bytes"])]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "rtx3090 has 101,376: _b asks for 200,000 bytes"
    assert report([Fits("l4", failed=["_c: broken"], over=["_b"])]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "l4, not compiled: _c: broken"


def test_cards_of_six_compute_capabilities_are_checked_in_both_modes():
    assert set(PLAN) == {"a100", "rtx3090", "rtx4090", "h100", "b200", "rtx5090"}
    assert PLAN["rtx4090"] == MODELS and all(
        set(models) <= {*MODELS, *WIDE_HEADS, *QUANTISED, *LATENT} for models in PLAN.values()
    )
    assert set(QUANTISED) <= set(PLAN["a100"]) and len(overrides_of(QUANTISED)) == len(QUANTISED)
    narrow = {"qwen3_1_7b", "qwen3_30b_a3b"}
    assert all(narrow & set(PLAN[card]) for card in ("rtx3090", "rtx4090", "rtx5090")), "products of width 2,048"
    modes = [("batch_invariant" in one) for one in overrides_of(MODELS)]
    assert modes.count(False) == len(MODELS) and modes.count(True) == len(MODELS) - 1, "gpt-oss has one mode"
