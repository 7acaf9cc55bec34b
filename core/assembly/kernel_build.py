"""Has an engine's kernels compiled in other processes while it starts, once for each model and card.

A child process runs `core.prebuild`, which finds out the kernels and compiles them. The engine goes on meanwhile: where
it launches a kernel that is not there yet, it waits for that one, and then reads it from Triton's cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import Condition, Thread, get_ident
from typing import Any

import torch

from hookline.core.assembly.compiler_child import STAMP, compiler_child, end_early, triton_cache
from hookline.core.assembly.config_tree import config_tree
from hookline.core.assembly.exported_kernels import fitting, in_export, manifest_of
from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.util.process import ending_of
from hookline.core.util.start_phases import StartPhases
from hookline.core.util.task_child import TaskChild

DONE = "kernel-done"
"""The first word of a child's line about a compiled kernel."""
AWAITED = "kernels compiled ahead"
"""The part of a start in which it waits for kernels that other processes compile."""
PATIENCE_S = 300.0
"""Longest wait for the child's kernels, in seconds from the child's start."""
ENDING_S = 5.0
"""Seconds to wait for the end of a process that is about to end."""
MOST_TOLD = 300
"""Most characters of a failed child's error that are shown."""
logger = logging.getLogger("hookline")


class KernelBuild:
    """A child process that compiles kernels, and its progress so far.

    child: see `core.prebuild.child`. stamp: the file that is written once it is done. versions: of the code, as
    `code_versions` returns them. known: kernels that were compiled for other configurations, see `known_keys`.
    """

    def __init__(
        self,
        child: TaskChild,
        stamp: Path,
        versions: Mapping[str, str] | None = None,
        known: Collection[str] = (),
    ) -> None:
        self.stamp, self._versions, self._known = stamp, versions, known
        self.variants: set[str] = set()
        """Variants of kernels that are compiled by now, as `late_work.variant_of` names them."""
        self._told: set[str] = set()
        self._result: dict[str, Any] | None = None
        self._has_ended = False
        self._news = Condition()
        self._deadline = time.monotonic() + PATIENCE_S
        self._child = child
        self._reader = Thread(target=self._read, name="kernel-build", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.process.stdout is not None
        try:
            with self._child.process.stdout as lines:
                for line in lines:
                    self._hear(line)
        finally:
            with self._news:
                self._has_ended = True
                self._news.notify_all()

    def _hear(self, line: str) -> None:
        told = progress_in(line)
        if told is None:
            self._result = result_in(line) or self._result
            return
        with self._news:
            self._told.add(told[0])
            self.variants.update(told[1:])
            self._news.notify_all()

    @contextmanager
    def awaited(self, phases: StartPhases) -> Iterator[None]:
        """Inside, the first launch of a kernel waits until the child is done with it, or has ended; see AWAITED.

        Of this thread alone: other threads' kernels are none of this engine's.
        """
        _hook_triton()
        _WAITING[get_ident()] = self, phases
        try:
            with phases.counting(lambda: f"{len(self._told)} kernels compiled"):
                yield
        finally:
            del _WAITING[get_ident()]

    def wait_for(self, key: str) -> None:
        """Wait until the child has compiled this kernel (see `key_of`), has ended, or PATIENCE_S have passed.

        Does not wait for a kernel that is known to be in the cache.
        """
        if key in self._known:
            return
        with self._news:
            self._news.wait_for(lambda: key in self._told or self._has_ended, self._deadline - time.monotonic())

    def finish(self) -> str | None:
        """Wait for the child; returns a summary in one line, or None if it failed: the engine then compiles by itself.

        A failure is stamped, too, so that the next start does not wait for it again.
        """
        self._reader.join(max(0.0, self._deadline - time.monotonic()))
        has_ended = self._has_ended
        if has_ended:
            with suppress(subprocess.TimeoutExpired):
                self._child.process.wait(ENDING_S)
        self._kill()
        found = self._result
        why = self._complaint() if has_ended else f"nothing came of it in {PATIENCE_S:.0f} s"
        self._child.errors.close()
        if found is None:
            mark_done(self.stamp, {"failed": [why]})
            logger.warning(
                "kernels could not be compiled ahead (%s), so they are compiled as they are needed; "
                "remove %s to have it tried again", why, self.stamp,
            )  # fmt: skip
            return None
        mark_done(self.stamp, found | {"versions": self._versions})
        for line in found["failed"]:
            logger.debug("not compiled ahead: %s", line)
        return "{num_compiled} of {num_kernels} kernels compiled ahead in {seconds:.1f} s".format(**found)

    def _complaint(self) -> str:
        """The last line of the ended child's errors, or how it ended."""
        self._child.errors.seek(0)
        lines = self._child.errors.read().decode(errors="replace").strip()
        return lines.rpartition("\n")[2][:MOST_TOLD] or f"it {ending_of(self._child.process.returncode)}"

    def end(self) -> None:
        """Kill the child, and the processes that it made, if they still run."""
        self._kill()
        self._child.errors.close()

    def _kill(self) -> None:
        if self._child.process.poll() is None or not self._has_ended:  # else its group's number may be another's by now
            self._child.kill()
        self._child.dismiss()
        self._reader.join(ENDING_S)


_WAITING: dict[int, tuple[KernelBuild, StartPhases]] = {}
"""By the id of each thread that starts an engine while its kernels are compiled: the build, and the phases in which its
waits are noted."""


def _hook_triton() -> None:
    """Hook into Triton before it compiles a kernel in this process. The hook stays; it acts only during a start."""
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    if getattr(before, "is_hooklines", False):
        return

    def _hook(*, fn: Any, compile: Any, **others: Any) -> bool:
        waiting = _WAITING.get(get_ident())
        if waiting is not None:
            build, phases = waiting
            with phases.part(AWAITED):
                build.wait_for(key_of(fn.jit_function, compile["specialization_data"]))
        return False if before is None else bool(before(fn=fn, compile=compile, **others))

    _hook.is_hooklines = True  # type: ignore[attr-defined]
    knobs.runtime.jit_cache_hook = _hook


def key_of(kernel: Any, specialization: str) -> str:
    """The name of a kernel's variant in messages of the child. specialization: Triton's JSON of the variant."""
    return hashlib.sha256(f"{kernel.__module__} {kernel.__name__} {specialization}".encode()).hexdigest()[:32]


def progress_line(key: str, variant: str | None) -> str:
    """The line by which a child says that it is done with a kernel.

    variant: its name by `late_work.variant_of`; None if it could not be compiled, so that the engine will try.
    """
    return " ".join(filter(None, (DONE, key, variant)))


def progress_in(line: str) -> list[str] | None:
    """The key and the name, if there is one, of the kernel of which such a line tells; None for any other line."""
    words = line.split()
    return words[1:] if words[:1] == [DONE] and words[1:] else None


def result_in(line: str) -> dict[str, Any] | None:
    """A `core.prebuild.build.Built` as the child prints it; None for any other line."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    needed = {"num_kernels", "num_compiled", "seconds", "failed"}
    return found if isinstance(found, dict) and needed <= found.keys() else None


def start_build(resolved: ResolvedConfig, stamp: Path | None) -> KernelBuild | None:
    """Begin to compile the kernels that this engine will launch; None if they are compiled already, or cannot be here.

    stamp: the result of `stamp_ahead`.
    """
    if stamp is None or stamp.exists():
        end_early()
        return None
    exported = fitting(resolved.config.engine.kernel_cache)
    if exported is not None:
        made_for = (manifest_of(exported) or {}).get("made_for", ())
        logger.warning(
            "engine.kernel_cache=%s was made for %s, and not for just this configuration; what it lacks is compiled",
            *(exported, "; ".join(map(str, made_for))),
        )
    task = json.dumps({
        "config": config_tree(resolved.config, resolved.kernels.name),
        "card": card_facts(resolved.device),
        "plugins": resolved.plugins,
    })  # fmt: skip
    child = compiler_child()
    child.give(task)
    versions = code_versions(resolved)
    folders = [triton_cache(), *filter(None, [exported])]
    return KernelBuild(child, stamp, versions, known_keys(folders, versions))


def hash_compiler_aside(resolved: ResolvedConfig) -> Thread | None:
    """A thread in which Triton computes the hash of its own files, 0.3 s that its first kernel else takes longer.

    Join it before that. None where no kernels are Triton's. To be called once Triton is imported.
    """
    if resolved.device.type != "cuda" or "triton" not in resolved.kernels.needs.packages:
        return None
    thread = Thread(target=_hash_compiler, name="triton-hash", daemon=True)
    thread.start()
    return thread


def _hash_compiler() -> None:
    with suppress(Exception):  # it is computed where it is needed then
        from triton.runtime.cache import triton_key

        triton_key()  # which Triton keeps


def stamp_ahead(resolved: ResolvedConfig) -> Path | None:
    """`stamp_of` for this engine's card; None if its kernels are not compiled in other processes."""
    if resolved.device.type != "cuda" or "triton" not in resolved.kernels.needs.packages or resolved.ranks.num_all > 1:
        return None
    if not resolved.config.engine.compile_ahead or find_spec("triton") is None:
        return None
    stamp = stamp_of(resolved, card_facts(resolved.device))
    return in_export(resolved.config.engine.kernel_cache, stamp)


def known_keys(folders: Iterable[Path], versions: Mapping[str, str]) -> frozenset[str]:
    """Kernels, see `key_of`, that these folders have by their stamps: of this code, for whatever model and card.

    A model's config may differ in values that no kernel depends on. A kernel that is missing after all is compiled by
    the engine.
    """
    keys = set[str]()
    for stamp in (path for folder in folders for path in folder.glob(STAMP.format("*"))):
        with suppress(OSError, ValueError, AttributeError):
            found: Any = json.loads(stamp.read_text())
            if found.get("versions") == versions:
                keys.update(found.get("keys", ()))
    return frozenset(keys)


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
            found[name] = version(name).partition("+")[0]  # of torch, what follows is the CUDA version, or none
        except PackageNotFoundError:
            found[name] = ""
    digest = hashlib.sha256()
    options = resolved.config.model, resolved.config.sampler
    for entry in (resolved.kernels, *(option.entry for option in options if option.entry is not None)):
        for path in code_files(entry.target.partition(":")[0]):
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
        "plugins": resolved.plugins,
        "model": [resolved.config.model.name, resolved.checkpoint.config],
        "others": [resolved.kernels.name, sampler.name, str(sampler.config)],
        "draws": [
            resolved.checkpoint.sampling_defaults,
            resolved.config.engine.prepared_sampling,
            {name: str(option) for name, option in resolved.config.extension_options.items()},
        ],
        "sizes": [
            str(attention.dtype),
            str(attention.kv_dtype),
            attention.block_size,
            attention.num_heads,
            attention.num_kv_heads,
        ],
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return triton_cache() / STAMP.format(name)


def mark_done(stamp: Path, found: Mapping[str, Any]) -> None:
    """Write the stamp; if the folder cannot be written to, go on without it."""
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(found))
    except OSError:
        logger.debug("%s cannot be written", stamp)
