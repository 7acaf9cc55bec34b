"""The fields of /v1/completions, its prompts in four forms, and their sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hookline.core.contracts import StructuredOutputs
from hookline.core.errors import shown
from hookline.core.sampling_params import SamplingParams
from hookline.core.serving import (
    SAME_NAMES,
    Naming,
    SamplingFields,
    are_ids,
    at_least,
    invalid,
    max_new_tokens,
    sampling_params,
)

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_SCORES = 2**20
"""Most log-probabilities of prompt tokens in a response, which has them in each choice: some 26 MB of JSON."""


class CompletionRequest(SamplingFields, kw_only=True):
    """Texts to be continued."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "import os", "max_tokens": 16, "temperature": 0}
    IGNORED: ClassVar[tuple[str, ...]] = (*SamplingFields.IGNORED, "best_of")

    prompt: str | list[Any] | None = None
    """A text, texts, token ids, or lists of token ids."""
    echo: bool | None = None
    """Return the prompt in front of the completion."""
    logprobs: int | None = None
    """Log-probabilities with this many alternatives; with echo, of the prompt too."""
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    """Put special tokens in front, as the tokenizer does with a text."""

    def check(self) -> None:
        """Check fields that depend on each other.

        Raises: ApiError for fields that exclude each other.
        """
        self.check_stream()
        if self.suffix:
            raise invalid("suffix is not supported by the model that is served", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(f"best_of={shown(self.best_of)} is not supported; use n", "best_of")
        at_least("max_tokens", self.max_tokens, 0 if self.echo else 1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of token ids.

        Raises: ApiError if the field has none of the four forms.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if are_ids(prompt):
                return [prompt]
            fits, what = _is_id, "no token id"
            if not _is_id(prompt[0]):
                fits, what = _is_prompt, "neither a text nor a list of token ids"
            odd = next((index for index, one in enumerate(prompt) if not fits(one)), None)
            if odd is None:
                return prompt
            raise invalid(f"prompt.{odd}={shown(prompt[odd])} is {what}", f"prompt.{odd}")
        form = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
        raise invalid(f"prompt={shown(prompt)} must be {form}, and not empty", "prompt")

    def asked(
        self,
        prompts: Sequence[list[int]],
        max_model_len: int,
        wanted: StructuredOutputs | None = None,
        naming: Naming = SAME_NAMES,
    ) -> list[tuple[list[int], SamplingParams]]:
        """The engine's prompts with their sampling parameters.

        With max_tokens 0 the engine generates one token, which the response leaves out. wanted: structured outputs.
        naming: parameter -> the request's field that errors name.
        Raises: ApiError or RequestError for a prompt without room.
        """
        scores = self.logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        further = {
            "logprobs": self.logprobs,
            "prompt_logprobs": scores if self.echo else None,
            "structured_outputs": wanted,
        }
        made: dict[int, SamplingParams] = {}
        found = []
        for index, prompt in enumerate(prompts):
            if self.fills_up(prompt, max_model_len):
                found.append((prompt[:-1], _of_last(prompt[-1], self.n or 1, scores)))
                continue
            name = f"prompt.{index}" if len(prompts) > 1 else "prompt"
            most = max_new_tokens(
                self.max_tokens, DEFAULT_MAX_TOKENS, len(prompt), max_model_len, prompt=name, limit="max_tokens"
            )
            most = max(1, most)
            if most not in made:
                with naming:
                    made[most] = sampling_params(self, most, **further)
            found.append((prompt, made[most]))
        return found

    def check_scores(self, prompts: Sequence[list[int]]) -> None:
        """Refuse a response with more than MAX_PROMPT_SCORES log-probabilities of prompt tokens, counted in each
        choice.

        Raises: ApiError.
        """
        name = "prompt_logprobs" if self.prompt_logprobs is not None else "logprobs"
        wanted = self.prompt_logprobs if self.prompt_logprobs is not None else self.logprobs if self.echo else None
        if wanted is None:
            return
        num_tokens, n, alternatives = sum(map(len, prompts)), self.n or 1, max(wanted, 1)
        if (number := num_tokens * n * alternatives) > MAX_PROMPT_SCORES:
            raise invalid(
                f"n={shown(n)} choices with {shown(alternatives)} alternatives ({name}) for each of {num_tokens} "
                f"prompt tokens are {shown(number)} log-probabilities; at most {MAX_PROMPT_SCORES} are answered: ask "
                "for fewer choices or alternatives",
                "n" if n > 1 else name,
            )

    def fills_up(self, prompt: Sequence[int], max_model_len: int) -> bool:
        """Whether a request asks only for log-probabilities of a prompt that leaves no room for a token."""
        return self.max_tokens == 0 and 1 < len(prompt) == max_model_len


def _of_last(token_id: int, n: int, scores: int | None) -> SamplingParams:
    """Parameters that make the engine generate the prompt's last token behind the others, in order to get its
    log-probability.
    """
    return SamplingParams(
        max_tokens=1, n=n, allowed_token_ids=(token_id,), ignore_eos=True, logprobs=scores, prompt_logprobs=scores
    )


def _is_id(value: object) -> bool:
    return type(value) is int


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or are_ids(value)
