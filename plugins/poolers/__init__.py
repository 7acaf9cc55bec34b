"""The poolers that ship with Hookline: their options and their registration. Imports no torch."""

from dataclasses import dataclass

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@dataclass
class YesNoConfig:
    """How likely a model answers yes rather than no: the score of rerankers such as Qwen3-Reranker."""

    yes: str = "yes"
    """The text of the token that means yes; it must be one token."""
    no: str = "no"
    """The text of the token that means no; it must be one token."""


@hookimpl
def register_poolers(register: Registrar) -> None:
    """Those of single tokens bear the names of sentence-transformers' modes, which is how checkpoints ask for them."""
    register(
        "lasttoken",
        "hookline.plugins.poolers.tokens:LastToken",
        help="the hidden state of the last token: the default",
        priority=10,
    )
    register("mean_tokens", "hookline.plugins.poolers.tokens:Mean", help="the mean of all tokens' hidden states")
    register("cls_token", "hookline.plugins.poolers.tokens:FirstToken", help="the hidden state of the first token")
    register(
        "class_logits",
        "hookline.plugins.poolers.heads:ClassLogits",
        help="logits of a ForSequenceClassification checkpoint's classes, at the last token",
    )
    register(
        "yes_no",
        "hookline.plugins.poolers.heads:YesNo",
        config=YesNoConfig,
        help="probability of yes against no as the next token: Qwen3-Reranker",
    )
