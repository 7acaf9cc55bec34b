"""Drafts by a smaller model of the same vocabulary, which draws with the requests' own seeds.

The model runs in an engine of its own, with its own KV cache, in which it finds what it computed in earlier steps: each
step is asked for as a new short request, whose prompt is found in the prefix cache up to its last block. A draw is a
function of the seed, the position and the logits, so where both models have similar logits they draw the same token,
at any temperature. Source: speculative decoding, Leviathan et al. 2023, arXiv:2211.17192; its acceptance rule is not
needed here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hookline.core.contracts import Drafter, DrafterSpec, DraftRow
from hookline.core.errors import ConfigError, HooklineError
from hookline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hookline.plugins.drafters import DraftModelConfig

logger = logging.getLogger("hookline")


class DraftModel(Drafter):
    """See DraftModelConfig."""

    def __init__(self, config: DraftModelConfig, spec: DrafterSpec) -> None:
        from hookline import LLM

        if not config.checkpoint and config.model == "auto":
            raise ConfigError("drafter=draft_model needs drafter.checkpoint=FOLDER or HUB_ID, or drafter.model=PRESET")
        self._has_told = False
        self.k, self.adaptive, self._vocab_size = config.k, config.adaptive, spec.vocab_size
        engine: dict[str, Any] = {
            "max_num_seqs": spec.max_num_seqs,
            "max_model_len": spec.max_model_len,
            "memory_fraction": config.memory_fraction,
            "cpu_cache_gib": config.cpu_cache_gib,
        }
        model: Any = {"name": config.model, "checkpoint": config.checkpoint} if config.checkpoint else config.model
        try:
            self._llm = LLM(model=model, device=spec.device, dtype=spec.dtype, engine=engine)
        except HooklineError as error:
            raise ConfigError(f"drafter=draft_model cannot start its model: {error}") from error

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        return self.propose_all([row])[0]

    def propose_all(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """The draft model's continuation of each request; it ends before a token that either model does not know."""
        params = [
            SamplingParams(
                temperature=row.params.temperature,
                top_p=row.params.top_p,
                top_k=row.params.top_k,
                min_p=row.params.min_p,
                max_tokens=row.num_drafts,
                seed=row.seed,
                ignore_eos=True,
            )
            for row in rows
        ]
        outputs = self._llm.generate([row.tokens.tolist() for row in rows], params)
        refused = next((output.error for output in outputs if output.error is not None), None)
        if refused is not None and not self._has_told:
            self._has_told = True
            logger.warning("drafter=draft_model: its model refuses a request, which goes on without: %s", refused)
        return [self._known(output.token_ids) for output in outputs]

    def close(self) -> None:
        """See Drafter."""
        self._llm.close()

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first token that the requests' model does not know."""
        end = next((place for place, token in enumerate(tokens) if token >= self._vocab_size), len(tokens))
        return list(tokens[:end])
