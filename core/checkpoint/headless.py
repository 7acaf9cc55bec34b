"""Checkpoints with the body of a language model alone, for embeddings, or with a head of classes in place of tokens.

transformers saves these with other tensors and names than a language model, whose names a model's targets have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hookline.core.contracts import WeightTarget

BODY, HEAD = "model.", "lm_head."
"""What transformers' names of a language model's body and of its head begin with."""
CLASSES = "score."
"""What those of a head of classes begin with; a pooler reads them by itself."""
_CLASSIFIER = "ForSequenceClassification"


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a checkpoint with a head of classes."""
    return _architecture(config).endswith(_CLASSIFIER)


def why_no_generation(config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint generates no tokens; None if it does."""
    architecture = _architecture(config)
    if not _has_no_head(config):
        return None
    return (
        f"this checkpoint has no head that gives tokens (architectures: {architecture}); it makes vectors: "
        "LLM.embed, LLM.classify or LLM.score, /v1/embeddings or /score"
    )


def fitted(
    targets: Mapping[str, WeightTarget], config: Mapping[str, Any], stored: Iterable[str]
) -> Mapping[str, WeightTarget]:
    """A model's targets under the names of a checkpoint. If the checkpoint has no head, the model's becomes zero.

    config: of its config.json; stored: names of its tensors, as the model calls them.
    """
    found = dict(targets)
    if _has_no_head(config):
        for name in [name for name in targets if name.startswith(HEAD)]:
            view = found.pop(name).view
            if view is not None:
                view.zero_()
            found[name] = WeightTarget.ignored()
    if is_classifier(config):
        found |= {name: WeightTarget.ignored() for name in stored if name.startswith(CLASSES)}
    if not any(name.startswith(BODY) for name in stored):
        found = {name.removeprefix(BODY): target for name, target in found.items()}
    return found


def _has_no_head(config: Mapping[str, Any]) -> bool:
    is_body = _architecture(config).endswith("Model") and not config.get("tie_word_embeddings")
    return is_body or is_classifier(config)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
