"""Where a checkpoint's folder is: given, in the Hugging Face hub or its cache, or shipped in a Python package.

The hub's library is imported only when a reference is a hub id.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from hookline.core.errors import CheckpointError, clipped

PACKAGE = "package:"
"""Prefix of a reference to a folder inside a Python package: package:MODULE/FOLDER."""
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_POOLING_FILES = ["*_Pooling/config.json"]
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def locate(reference: str) -> Path:
    """The folder of a reference; a hub id is downloaded unless it is in the cache.

    Raises: CheckpointError with the places that were tried and the fix.
    """
    if reference.startswith(PACKAGE):
        return _packaged(reference)
    try:
        folder = Path(reference).expanduser()
        if reference and folder.is_dir():
            return folder
        if is_hub_id(reference):
            return _download(reference)
        what = "is a file" if reference and folder.is_file() else "does not exist"
    except (OSError, RuntimeError) as error:  # the name is too long, or its ~user does not exist
        what = f"cannot be looked for ({getattr(error, 'strerror', None) or error})"
    subject = f"model.checkpoint '{clipped(reference)}' {what}" if reference else "model.checkpoint is not set"
    raise CheckpointError(
        f"{subject}; give a folder with config.json and *.safetensors, a hub id (owner/name) or package:MODULE/FOLDER"
    )


def refuse_absent(reference: str, *, is_claimed: bool = False) -> None:
    """Refuse a path that is not there, for callers whose imports take seconds before the checkpoint is looked for.

    is_claimed: the model is known, and its class may open references that are no paths; then only a reference that is
    written as a path is refused. A reference with a colon is never refused here.

    Raises: CheckpointError as `locate` does.
    """
    is_path = reference.startswith(("/", ".", "~")) or not (is_claimed or is_hub_id(reference))
    if reference and is_path and ":" not in reference and not os.path.exists(os.path.expanduser(reference)):
        locate(reference)


def is_hub_id(reference: str) -> bool:
    """Whether a reference has the form owner/name and is no local folder."""
    return _HUB_ID.fullmatch(reference) is not None and not Path(reference).is_dir()


def cached_on_disk(reference: str) -> Path | None:
    """The folder of a hub id in the local cache, without the network; None if its config is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    config = try_to_load_from_cache(reference, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _packaged(reference: str) -> Path:
    module, _, inside = reference.removeprefix(PACKAGE).partition("/")
    try:
        folder = Path(str(importlib.resources.files(module))) / inside
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointError(f"'{reference}': package '{module}' cannot be found ({error}); install it") from error
    if not inside or not folder.is_dir():
        raise CheckpointError(
            f"'{reference}': package '{module}' has no folder '{inside}'; expected package:MODULE/FOLDER"
        )
    return folder


def _download(reference: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        # Subfolders and Mistral's consolidated files hold other formats of the same weights.
        folder = Path(snapshot_download(reference, allow_patterns=_HUB_FILES, ignore_patterns=["*/*", "consolidated*"]))
        if (folder / "modules.json").is_file():
            snapshot_download(reference, allow_patterns=_POOLING_FILES)
        return folder
    except Exception as error:
        raise CheckpointError(
            f"checkpoint '{reference}' is no local folder, and the Hugging Face hub and its cache do not give it "
            f"({first_line(error)}); pass a local folder: model.checkpoint=/path/to/folder"
        ) from error
