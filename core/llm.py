"""The blocking front: prompts in, finished outputs out.

Knows text, the configuration and the engine's five verbs; no tensors and no policy. Several LLMs may live side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from core.build import build_engine
from core.checkpoint import Checkpoint, locate
from core.config import Config, validate
from core.engine import Engine, StepStats
from core.errors import RequestError
from core.plugin_host import PluginHost
from core.request import FinishReason, RequestOutput
from core.sampling import SamplingParams
from core.text import Codec, Prompt, as_prompts

OptionValue = str | Mapping[str, Any] | None


class ProgressBar(Protocol):
    """Shows how far a generate call is."""

    def update(self, num_finished: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Add what one step did."""
        ...

    def close(self) -> None:
        """Take the bar off the screen."""
        ...


class LLM:
    """An engine with a tokenizer: `generate` blocks until every prompt is done.

    An option is a name, or a mapping with `name` and the option's fields; the keys are those of the command line, and
    what is left out is as there: conf/config.yaml says.
    checkpoint: short for model's `checkpoint` field.
    Raises: HooklineError for anything that cannot be used, with the value, the limit and the fix.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        *,
        model: OptionValue = None,
        scheduler: OptionValue = None,
        sampler: OptionValue = None,
        kernels: OptionValue = None,
        engine: Mapping[str, Any] | None = None,
        tp: int | None = None,
        seed: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> None:
        host = PluginHost.load()
        host.log_problems()
        options = {"model": model, "scheduler": scheduler, "sampler": sampler, "kernels": kernels, "engine": engine}
        tree: dict[str, Any] = {**options, "tp": tp, "seed": seed, "dtype": dtype, "device": device}
        config = validate({key: value for key, value in tree.items() if value is not None}, host)
        if checkpoint is not None:
            config = _with_checkpoint(config, checkpoint)
        self._start(config, host)

    @classmethod
    def from_config(cls, config: Config, host: PluginHost) -> LLM:
        """An LLM from a validated configuration, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._start(config, host)
        return llm

    def _start(self, config: Config, host: PluginHost) -> None:
        self.config = config
        built = build_engine(config, host)
        self.engine: Engine = built.engine
        self.device, self.kernels_name = built.choice.device, built.choice.kernels.name
        checkpoint = built.choice.checkpoint
        self.codec = Codec(_tokenizer_folder(config, checkpoint))
        if checkpoint.is_packaged and config.model.config.weights == "checkpoint":
            reference = checkpoint.reference.removeprefix("package:")
            print(
                f"hookline: using the bundled checkpoint {reference}, a toy that checks an installation; "
                "model.checkpoint=FOLDER or a preset takes a real one",
                file=sys.stderr,
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressBar | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and return one output each, in their order.

        prompts: a text, a list of token ids or a list of chat messages, or a list of such.
        params:  for all prompts, or one each; None means SamplingParams().
        A prompt that cannot be served yields an output with finish_reason "error" and its reason; the others run on.
        Whatever interrupts the call, its requests are gone afterwards.
        Raises: RequestError if there are not as many params as prompts; PlanError if the scheduler misbehaves.
        """
        wanted = as_prompts(prompts)
        each = _params_each(params, len(wanted))
        outputs: list[RequestOutput | None] = [None] * len(wanted)
        places: dict[int, int] = {}
        try:
            for place, (prompt, one) in enumerate(zip(wanted, each, strict=True)):
                self._add(place, prompt, one, outputs, places)
            self._run(outputs, places, progress)
        finally:
            self.engine.abort(list(places))
            if progress is not None:
                progress.close()
        return [output for output in outputs if output is not None]

    def _add(
        self,
        place: int,
        prompt: Prompt,
        params: SamplingParams,
        outputs: list[RequestOutput | None],
        places: dict[int, int],
    ) -> None:
        text = prompt if isinstance(prompt, str) else None
        token_ids: Sequence[int] = ()
        try:
            token_ids = self.codec.encode(prompt)
            places[self.engine.add(token_ids, params, prompt=text)] = place
        except RequestError as error:
            outputs[place] = self.engine.refuse(token_ids, error, text)

    def _run(self, outputs: list[RequestOutput | None], places: dict[int, int], progress: ProgressBar | None) -> None:
        while places:
            finished = self.engine.step()
            for output in finished:
                place = places.pop(output.request_id, None)
                if place is not None:
                    outputs[place] = self._with_text(output)
            stats = self.engine.last_stats
            if progress is not None and stats is not None:
                _show(progress, len(finished), stats)

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        ids = output.token_ids
        return replace(output, text=self.codec.decode(ids[:-1] if output.finish_reason is FinishReason.STOP else ids))

    def close(self) -> None:
        """Release the engine's memory; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _show(progress: ProgressBar, num_finished: int, stats: StepStats) -> None:
    progress.update(num_finished, stats.num_prefill_tokens, stats.num_decode_tokens)


def _params_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts; pass one, or one for each prompt")
    return list(params)


def _with_checkpoint(config: Config, checkpoint: str) -> Config:
    return replace(config, model=replace(config.model, config=replace(config.model.config, checkpoint=checkpoint)))


def _tokenizer_folder(config: Config, checkpoint: Checkpoint) -> Any:
    tokenizer = config.model.config.tokenizer
    return locate(tokenizer) if tokenizer else checkpoint.folder
