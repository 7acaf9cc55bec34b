"""tools/compare_kernels.py: code that only moved is the same as before, and arithmetic that changed is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tools.compare_kernels import (
    HERE,
    Compiled,
    Variant,
    described,
    differences,
    machine_code,
    saved,
    source_digest,
    table,
)

ONE = Variant("silu", "BLOCK=1024 num_warps=4", 28, 0, 0, "source", "ptx", "code")
LAUNCH = """
import torch
from hookline.plugins.kernels.norms import triton_gates

def launch():
    triton_gates.gated_mul(torch.empty(4, 256, dtype=torch.bfloat16, device="cuda"))
"""


def test_variants_of_other_arguments_and_the_same_code_are_the_same() -> None:
    renamed = replace(ONE, told="BLOCK=1024 WIDE=False num_warps=4", ptx="other")
    assert differences([ONE, renamed], [renamed, ONE]) == differences([renamed], [ONE]) == []
    assert table([renamed], [ONE])[1].split() == ["silu", "1", "1", "28", "0", "0"]


def test_variants_of_other_code_are_told_with_what_they_take() -> None:
    changed = replace(ONE, registers=256, spilled=16, code="other")
    assert table([changed], [ONE])[1].split() == ["silu", "1", "0", "256", "16", "0"]
    (told,) = differences([changed], [ONE])
    before, after = "28 registers, 0 bytes spilled, 0 bytes shared", "256 registers, 16 bytes spilled, 0 bytes shared"
    assert told == f"silu: {before} -> {after}\n    {ONE.told}"
    assert differences([], [ONE]) == [f"silu: {before} -> none\n    {ONE.told}"]
    assert differences([ONE], []) == [f"silu: none -> {before}\n    {ONE.told}"]


def test_a_variant_is_told_whatever_the_order_of_its_arguments() -> None:
    told = {
        "signature": {"x_ptr": "*bf16", "width": "i32", "BLOCK": "constexpr"},
        "constant_keys": [[2]], "constant_vals": [1024],
        "attrs_keys": [[0]], "attrs_vals": [[["tt.divisibility", 16]]],
        "options": {"num_warps": 4, "num_stages": 3, "maxnreg": None, "launch_pdl": True},
    }  # fmt: skip
    options = "num_warps=4 num_stages=3 maxnreg=None launch_pdl=True"
    assert described(told) == f"BLOCK=1024 {options} width:i32 x_ptr:*bf16 x_ptr%16"
    told |= {"signature": {"BLOCK": "constexpr", "width": "i32", "x_ptr": "*bf16"}, "constant_keys": [[0]]}
    told["attrs_keys"] = [[2]]
    assert described(told) == f"BLOCK=1024 {options} width:i32 x_ptr:*bf16 x_ptr%16"


def test_names_and_places_of_values_are_not_compared_but_what_is_computed_is() -> None:
    code = """#loc1 = loc("a.py":1:1)
func(%x: i32 loc("x"(#loc1))) {
  %1 = add %x, %x : i32 loc(#loc1)
  %2:2 = for %at = %x iter_args(%sum = %1) {
    %3 = mul %at, %sum : i32 loc(callsite(#loc1 at #loc2))
  } {
  ^bb0(%3: i32):
    %4 = sub %3, %1 : i32
  }
}"""
    renamed = code.replace("%x", "%width").replace("%1", "%doubled").replace("^bb0(%3: i32):", "^bb0(%of: i32):")
    renamed = renamed.replace("sub %3", "sub %of").replace("a.py", "b.py").replace("#loc1", "#loc7")
    assert source_digest(renamed, {}) == source_digest(code, {}) != source_digest(code, {"num_warps": 8})
    assert source_digest(code.replace("sub %3, %1", "sub %1, %3"), {}) != source_digest(code, {})


def test_machine_code_is_what_a_cubin_has_loaded() -> None:
    header = bytes(0x28) + (64).to_bytes(8, "little") + bytes(10) + (64).to_bytes(2, "little") + b"\3\0" + b"\0\0"
    loaded, left = b"instructions", b"notes"
    content = loaded + left

    def section(kind: int, flags: int, offset: int, size: int) -> bytes:
        words = (kind.to_bytes(4, "little"), flags.to_bytes(8, "little"), bytes(8))
        return bytes(4) + b"".join(words) + offset.to_bytes(8, "little") + size.to_bytes(8, "little") + bytes(24)

    at = 64 + 3 * 64
    sections = section(0, 0, 0, 0) + section(1, 6, at, len(loaded)) + section(1, 0, at + len(loaded), len(left))
    assert machine_code(header + sections + content) == loaded


@pytest.mark.slow
def test_a_kernel_is_compiled_and_found_to_differ_from_another_checkouts(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    other, launches, here = tmp_path / "other.json", tmp_path / "launches.py", tmp_path / "here.json"
    other.write_text(json.dumps(asdict(Compiled([replace(ONE, kernel="_silu_mul_kernel")], [], []))))
    launches.write_text(LAUNCH)
    command = [sys.executable, HERE / "tools" / "compare_kernels.py", other, "--of", launches, "--save", here]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([*command, "--processes", "1"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split()[:3] == ["_silu_mul_kernel", "1", "0"]
    assert lines[-1] == "1 variants here, 1 there; 0 of the same PTX, 2 differ"
    (found,) = saved(here).variants
    assert found.kernel == "_silu_mul_kernel" and found.registers > 8 and "BLOCK=1024" in found.told
