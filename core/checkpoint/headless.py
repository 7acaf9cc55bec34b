"""Checkpoints without a language-model head: the body alone, for embeddings, or with a head for classification.

transformers saves these with other tensor names than a language model's, which the model's targets have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hookline.core.contracts import WeightTarget

BODY, HEAD = "model.", "lm_head."
"""Prefixes of transformers' tensor names in a language model's body and head."""
CLASSES = "score."
"""Prefix of the tensor names of a classification head, which a pooler reads itself."""
_CLASSIFIER = "ForSequenceClassification"
_BODY, _WITH_HEAD = "Model", "LMHeadModel"
"""Suffixes of the architectures of a body alone, and of older language models, as GPT2LMHeadModel and BertLMHeadModel.
"""


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the config.json is that of a checkpoint with a classification head."""
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
    """A model's targets under the names of a checkpoint. If the checkpoint has no head, the model's head becomes zero.

    config: its config.json. stored: the names of its tensors, translated to the model's.
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
    architecture = _architecture(config)
    is_body = architecture.endswith(_BODY) and not architecture.endswith(_WITH_HEAD)
    return (is_body and not config.get("tie_word_embeddings")) or is_classifier(config)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
