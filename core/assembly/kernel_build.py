"""Kernels compiled in processes of their own while an engine's weights load: started, waited for, and not done twice.

Knows no kernel: what is launched and how it is compiled is `core.prebuild`'s, which runs in a child process.
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

CHILD = "hookline.core.prebuild.child:main"
"""What the child process runs; it is a layer above this one, so it is named and not imported."""
PATIENCE_S = 300.0
MOST_TOLD = 300
"""Characters of what a failed child said."""
logger = logging.getLogger("hookline")


@dataclass
class KernelBuild:
    """A child process that compiles. stamp: the file that says that it is done, once it is."""

    process: subprocess.Popen[str]
    stamp: Path

    def wait(self) -> str | None:
        """Wait for it; what it came to, in a few words. If it fails the engine compiles what it needs by itself.

        A failure is remembered, too: the next start does not wait for it again.
        """
        why = f"nothing came of it in {PATIENCE_S:.0f} s"
        try:
            told, complaint = self.process.communicate(timeout=PATIENCE_S)
            why = complaint.strip().rpartition("\n")[2][:MOST_TOLD] or f"exit code {self.process.returncode}"
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
        """Kill it, if it runs."""
        self.process.kill()
        self.process.communicate()


def start_build(resolved: ResolvedConfig, stamp: Path | None) -> KernelBuild | None:
    """Begin to compile what this engine will launch; None if there is nothing to do, or nothing to do it with.

    stamp: what `stamp_ahead` gives.
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
    """See `stamp_of`, on this card; None if no kernels of such an engine are compiled in other processes."""
    if resolved.device.type != "cuda" or "triton" not in resolved.kernels.needs.packages or resolved.ranks.num_all > 1:
        return None
    if not resolved.config.engine.compile_ahead or find_spec("triton") is None:
        return None
    return stamp_of(resolved, card_facts(resolved.device))


def variants_ahead(stamp: Path | None) -> frozenset[str]:
    """What other processes have compiled by the time of this stamp, as `late_work.variant_of` names it."""
    if stamp is None:
        return frozenset()
    try:
        return frozenset(json.loads(stamp.read_text()).get("variants", ()))
    except (OSError, ValueError):
        return frozenset()


def card_facts(device: torch.device) -> dict[str, Any]:
    """What `core.prebuild.pretended.Card` is made of."""
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "compute_capability": [properties.major, properties.minor],
        "num_sms": properties.multi_processor_count,
        "shared_memory_bytes": properties.shared_memory_per_block_optin,
    }


def code_versions(resolved: ResolvedConfig) -> dict[str, str]:
    """Versions of what compiles, and of the files that kernels are in."""
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
    """The files of the package that a module lies in, packages inside it included; a module in none is one file."""
    spec = find_spec(module)
    if spec is None or not spec.origin:
        return []
    return sorted(Path(spec.origin).parent.rglob("*.py")) if spec.parent else [Path(spec.origin)]


def stamp_of(resolved: ResolvedConfig, card: Mapping[str, Any]) -> Path:
    """The file that says that the kernels of such a model on such a card are in Triton's cache; it lies there, too.

    Limits of the engine are not among what it goes by: few variants hang on them.
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
    """Write the stamp; a folder that cannot be written to is no reason not to start."""
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(found))
    except OSError:
        logger.debug("%s cannot be written", stamp)
