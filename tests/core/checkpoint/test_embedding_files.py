"""What the files of sentence-transformers say of a checkpoint's embeddings, and what is refused of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hookline.core.checkpoint.embedding_files import pooling_defaults
from hookline.core.pooling_params import CLASSIFY, EMBED, SCORE, PoolingDefaults

KIND = "sentence_transformers.models"
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}


def written(folder: Path, modules: Any, pooling: Any = None, path: str = "1_Pooling") -> PoolingDefaults:
    (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    (folder / path / "config.json").write_text(pooling if isinstance(pooling, str) else json.dumps(pooling))
    return pooling_defaults(folder, {})


def module(name: str, path: str = "") -> dict[str, Any]:
    return {"type": f"{KIND}.{name}", "path": path}


PLAIN = [module("Transformer"), module("Pooling", "1_Pooling")]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 8}


def test_without_them_the_architecture_says_what_scores(tmp_path: Path) -> None:
    assert pooling_defaults(tmp_path, {}) == pooling_defaults(None, {}) == PoolingDefaults(scored_by=SCORE)
    assert pooling_defaults(tmp_path, CLASSIFIER).scored_by == CLASSIFY


def test_the_mode_and_the_scaling_are_those_of_the_files(tmp_path: Path) -> None:
    assert written(tmp_path, PLAIN, MEAN) == PoolingDefaults("mean_tokens", False, scored_by=EMBED)
    assert written(tmp_path, [*PLAIN, module("Normalize")], MEAN).normalizes
    assert written(tmp_path, PLAIN, {"pooling_mode": "lasttoken"}).pooler == "lasttoken"
    elsewhere = written(tmp_path, [PLAIN[0], module("Pooling", "pool")], {"pooling_mode": "cls"}, "pool")
    assert elsewhere.pooler == "cls"


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ("nonsense", MEAN, "does not say how to pool"),
        ("[" * 100_000, MEAN, "does not say how to pool"),
        ({}, MEAN, "it is not a list of modules"),
        ([module("Transformer")], MEAN, "its modules are"),
        ([*PLAIN, module("Dense", "2_Dense")], MEAN, "its modules are"),
        ([PLAIN[0], module("Pooling", "../1_Pooling")], MEAN, "leads out of the folder"),
        ([PLAIN[0], module("Pooling", "/etc")], MEAN, "leads out of the folder"),
        ([PLAIN[0], module("Pooling", "missing")], MEAN, "does not say how to pool"),
        (PLAIN, [], "is not an object"),
        (PLAIN, {}, "one can be computed"),
        (PLAIN, {**MEAN, "pooling_mode_cls_token": True}, "one can be computed, not several"),
        (PLAIN, {"pooling_mode": [3]}, "one can be computed"),
        (PLAIN, {**MEAN, "include_prompt": False}, "include_prompt is false"),
    ],
)
def test_what_cannot_be_computed_is_kept_as_the_reason(
    tmp_path: Path, modules: Any, pooling: Any, message: str
) -> None:
    found = written(tmp_path, modules, pooling)
    assert message in (found.refusal or "") and "name a pooler" in (found.refusal or "") and found.pooler is None
    assert "\n" not in (found.refusal or "")


def test_a_pipe_is_named_and_never_waited_for(tmp_path: Path) -> None:
    written(tmp_path, PLAIN, MEAN)
    pipe = tmp_path / "1_Pooling" / "config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(MEAN),), daemon=True)
    writer.start()  # whoever opens the pipe reads what would be right
    try:
        found = pooling_defaults(tmp_path, {})
        assert "config.json' is no file; name a pooler" in (found.refusal or "")
    finally:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        writer.join(10)
        os.close(reader)
