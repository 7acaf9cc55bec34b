"""Has an engine's kernels compiled in other processes while its weights load, once for each model and card.

A child process runs `core.prebuild`, which finds out the kernels and compiles them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hookline.core.assembly.config_tree import config_tree
from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.util.child_python import python_command
from hookline.core.util.process import ending_of

CHILD = "hookline.core.prebuild.child:main"
"""What the child process runs. It is named and not imported, since it stands above this package."""
PATIENCE_S = 300.0
MOST_TOLD = 300
"""Most characters of a failed child's error that are shown."""
logger = logging.getLogger("hookline")


@dataclass
class KernelBuild:
    """A child process that compiles. stamp: the file that is written once it is done."""

    process: subprocess.Popen[str]
    stamp: Path

    def wait(self) -> str | None:
        """Wait for the child; returns a summary in one line, or None if it failed: the engine then compiles by itself.

        A failure is stamped, too, so that the next start does not wait for it again.
        """
        why = f"nothing came of it in {PATIENCE_S:.0f} s"
        try:
            told, complaint = self.process.communicate(timeout=PATIENCE_S)
            why = complaint.strip().rpartition("\n")[2][:MOST_TOLD] or f"it {ending_of(self.process.returncode)}"
            found: dict[str, Any] = json.loads(told.strip().rpartition("\n")[2])
        except (subprocess.TimeoutExpired, ValueError):
            self.end()
            mark_done(self.stamp, {"failed": [why]})
            logger.warning(
                "kernels could not be compiled ahead (%s), so they are compiled as they are needed; "
                "remove %s to have it tried again", why, self.stamp,
            )  # fmt: skip
            return None
        mark_done(self.stamp, found)
        for line in found["failed"]:
            logger.debug("not compiled ahead: %s", line)
        return f"{found['num_compiled']} of {found['num_kernels']} kernels compiled ahead in {found['seconds']:.1f} s"

    def end(self) -> None:
        """Kill the child if it still runs."""
        self.process.kill()
        self.process.communicate()


def start_build(resolved: ResolvedConfig, stamp: Path | None) -> KernelBuild | None:
    """Begin to compile what this engine will launch; None if that is done already, or cannot be done here.

    stamp: what `stamp_ahead` returned.
    """
    if stamp is None or stamp.exists():
        return None
    task = {
        "config": config_tree(resolved.config, resolved.kernels.name),
        "card": card_facts(resolved.device),
        "plugins": resolved.plugins,
    }
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # it needs no GPU, and must not
    process = subprocess.Popen(
        python_command(CHILD, json.dumps(task)),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    return KernelBuild(process, stamp)


def stamp_ahead(resolved: ResolvedConfig) -> Path | None:
    """`stamp_of` for this engine's card; None if its kernels are not compiled in other processes."""
    if resolved.device.type != "cuda" or "triton" not in resolved.kernels.needs.packages or resolved.ranks.num_all > 1:
        return None
    if not resolved.config.engine.compile_ahead or find_spec("triton") is None:
        return None
    return stamp_of(resolved, card_facts(resolved.device))


def variants_ahead(stamp: Path | None) -> frozenset[str]:
    """The kernels that other processes compiled when this stamp was written, as `late_work.variant_of` names them."""
    if stamp is None:
        return frozenset()
    try:
        return frozenset(json.loads(stamp.read_text()).get("variants", ()))
    except (OSError, ValueError):
        return frozenset()


def card_facts(device: torch.device) -> dict[str, Any]:
    """The facts of this card as plain data, of which `core.prebuild.pretended.Card` is made."""
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "compute_capability": [properties.major, properties.minor],
        "num_sms": properties.multi_processor_count,
        "shared_memory_bytes": properties.shared_memory_per_block_optin,
    }


def code_versions(resolved: ResolvedConfig) -> dict[str, str]:
    """Versions of the compilers, and a digest of the files that kernels are in."""
    found = {}
    for name in ("torch", "triton", "hookline"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    digest = hashlib.sha256()
    for target in (resolved.kernels.target, resolved.config.sampler.entry and resolved.config.sampler.entry.target):
        for path in code_files(str(target).partition(":")[0]):
            digest.update(path.read_bytes())
    return {**found, "files": digest.hexdigest()}


def code_files(module: str) -> list[Path]:
    """All files of the package that a module is in, sub-packages included; its own file if it is in no package."""
    spec = find_spec(module)
    if spec is None or not spec.origin:
        return []
    return sorted(Path(spec.origin).parent.rglob("*.py")) if spec.parent else [Path(spec.origin)]


def stamp_of(resolved: ResolvedConfig, card: Mapping[str, Any]) -> Path:
    """The file, in Triton's cache, which records that this model's kernels for this card were compiled.

    Its name is a digest of what the kernels depend on. The engine's limits are left out: few variants depend on them.
    """
    attention, sampler = resolved.attention, resolved.config.sampler
    facts = {
        "card": dict(card),
        "versions": code_versions(resolved),
        "model": [resolved.config.model.name, resolved.checkpoint.config],
        "others": [resolved.kernels.name, sampler.name, str(sampler.config)],
        "sizes": [str(attention.dtype), attention.block_size, attention.num_heads, attention.num_kv_heads],
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(folder) / f"hookline-{name}.json"


def mark_done(stamp: Path, found: Mapping[str, Any]) -> None:
    """Write the stamp; if the folder cannot be written to, go on without it."""
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(found))
    except OSError:
        logger.debug("%s cannot be written", stamp)
