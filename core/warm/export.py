"""Writes what was compiled into a folder from which engines elsewhere take it; see `core.assembly.exported_kernels`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from hookline.core.assembly.compiler_child import STAMP
from hookline.core.assembly.exported_kernels import (
    GROUP,
    MANIFEST,
    compiler_versions,
    manifest_of,
    misfit_of,
    use_exported,
)
from hookline.core.errors import ConfigError
from hookline.core.util.files import write_whole

KEPT = (".json", ".cubin")
"""Suffixes of the files that Triton needs to launch a kernel; the stages on the way to them are left out."""


@contextmanager
def compiled_into(target: Path, made_for: str) -> Iterator[None]:
    """Inside, Triton compiles all that the export does not have yet, whatever its own cache has; then it is added.

    made_for: what the manifest says of it, the model and the card.
    Raises: ConfigError if the folder has other things, or kernels of other versions, or cannot be written to.
    """
    why = misfit_of(target) if target.exists() else None
    if why is not None:
        raise ConfigError(f"export={target}: {why}; name another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if manifest_of(target) is not None:
            use_exported(str(target))
        with TemporaryDirectory(prefix=".making-", dir=target) as scratch:
            with patch.dict(os.environ, TRITON_CACHE_DIR=scratch):
                yield
            _add(Path(scratch), target)
            _note(target, made_for)
    except OSError as error:
        raise ConfigError(f"export={target} cannot be written to: {error.strerror or error}") from error


def num_bytes(target: Path) -> int:
    """Of all files of an export."""
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def _add(cache: Path, target: Path) -> None:
    """Add to the export what a cache of Triton's has; each of its folders at once, so that readers see whole ones."""
    for folder in sorted(path for path in cache.iterdir() if path.is_dir()):
        chosen, groups = _kept(folder)
        if not chosen or (target / folder.name).exists():
            continue
        part = cache / f"{folder.name}.export"
        part.mkdir()
        for path in chosen:
            shutil.copyfile(path, part / path.name)
        for name, names in groups.items():
            (part / name).write_text(json.dumps(names))
        os.rename(part, target / folder.name)
    for stamp in cache.glob(STAMP.format("*")):
        shutil.copyfile(stamp, target / stamp.name)


def _kept(folder: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """The files of one key that are exported, and the lists of files, by their names, in which no path is."""
    chosen, groups = [path for path in folder.iterdir() if path.suffix == ".so"], {}
    for group in folder.glob(f"{GROUP}*"):
        names = [name for name in json.loads(group.read_text())["child_paths"] if name.endswith(KEPT)]
        chosen += [folder / name for name in names]
        groups[group.name] = names
    return chosen, groups


def _note(target: Path, made_for: str) -> None:
    """Write the manifest, with what it said before."""
    made = dict.fromkeys([*(manifest_of(target) or {}).get("made_for", ()), made_for])
    told = json.dumps({"versions": compiler_versions(), "made_for": list(made)}, indent=2)
    write_whole(target / MANIFEST, [told, "\n"], "export")
