"""The blocking front: prompts in, finished outputs or their pieces out.

Knows text, the configuration and the engine's methods; no tensors and no policy. Several LLMs may live side by side.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from hookline.core.assembly.auto_model import with_model
from hookline.core.assembly.engine import build_engine, eos_token_ids
from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.checkpoint.locate import locate
from hookline.core.config.settings import Config, chosen_entries, validate
from hookline.core.engine.engine import Engine
from hookline.core.errors import HooklineError, PluginError, RequestError, shown
from hookline.core.frontend.generation import Asked, Call, ProgressBar, params_each
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.frontend.pooling_calls import PoolingCalls
from hookline.core.frontend.step_guard import StepGuard
from hookline.core.outputs import Delta, RequestOutput
from hookline.core.plugin.host import PluginHost
from hookline.core.request_options import EachOptionKeys, options_each
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Codec, Prompt, as_prompts, is_chat, token_texts
from hookline.core.tokenizer.token_bytes import grammar_vocabulary
from hookline.core.util.garbage import search_frozen

logger = logging.getLogger("hookline")
OptionValue = str | Mapping[str, Any] | None


class LLM(PoolingCalls):
    """An engine with a tokenizer: `generate` blocks until every prompt is done, `stream` yields text as it comes.

    Not thread-safe, but calls may nest: what one call's steps bring for another one is kept for it.

    The arguments have the names, checks and defaults of the command line's keys: `hookline run --help`. An option
    is its name, or a mapping with `name` and the option's fields.

    Args:
        checkpoint: a folder or a hub id; short for the model's field `checkpoint`.
        model: the model that serves it; found by the checkpoint's architecture unless it is named.
        scheduler: the policy that says which requests a step computes.
        sampler: what draws tokens.
        kernels: the numerical back end.
        grammars: the back end of structured outputs.
        pooler: what makes vectors of hidden states.
        quantization: how weights are quantised; read from the checkpoint unless it is named.
        drafter: what guesses the next tokens of requests, so that a step computes several; none unless it is named.
        observers: names of observers, or mappings as for options.
        processors: `{name: {field: value}}`, arguments of logits processors for requests that do not say otherwise.
        extensions: likewise settings of step extensions, and arguments of theirs.
        engine: `{field: value}`, sizes and limits, as `engine.*` on the command line.
        tp: tensor-parallel ranks, one GPU each.
        pp: pipeline-parallel stages of consecutive layers, each of `tp` ranks.
        seed: of requests that bring none, and of random weights.
        dtype: of weights and activations: "float32", "bfloat16" or "float16".
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        HooklineError: for anything that cannot be used, with the value, the limit and the fix: ConfigError for an
            option, CheckpointError for the model's files, CapacityError if memory does not suffice, PluginError for a
            plugin.
    """

    _SERVES = False
    """Whether first uses of tokenizer and grammars are prepared at the start; see ServingLLM."""

    def __init__(
        self,
        checkpoint: str | None = None,
        *,
        model: OptionValue = None,
        scheduler: OptionValue = None,
        sampler: OptionValue = None,
        kernels: OptionValue = None,
        grammars: OptionValue = None,
        pooler: OptionValue = None,
        quantization: OptionValue = None,
        drafter: OptionValue = None,
        observers: str | Sequence[str | Mapping[str, Any]] | None = None,
        processors: Mapping[str, Mapping[str, Any]] | None = None,
        extensions: Mapping[str, Mapping[str, Any]] | None = None,
        engine: Mapping[str, Any] | None = None,
        tp: int | None = None,
        pp: int | None = None,
        seed: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> None:
        host = PluginHost.load()
        host.log_problems()
        options = {"model": model, "scheduler": scheduler, "sampler": sampler, "kernels": kernels, "grammars": grammars}
        options |= {"pooler": pooler, "quantization": quantization, "drafter": drafter}
        tree: dict[str, Any] = {**options, "engine": engine, "tp": tp, "pp": pp, "seed": seed, "dtype": dtype}
        tree |= {"device": device, "observers": observers, "processors": processors, "extensions": extensions}
        if checkpoint is not None:
            tree["model"] = {**({"name": model} if isinstance(model, str) else model or {}), "checkpoint": checkpoint}
        config = validate({key: value for key, value in tree.items() if value is not None}, host)
        self._start(config, host)

    @classmethod
    def from_config(cls, config: Config, host: PluginHost, *, is_command: bool = True) -> LLM:
        """An LLM from a validated configuration. is_command: the process is a command's and this its one engine."""
        llm = cls.__new__(cls)
        llm._start(config, host, is_command=is_command)
        return llm

    def _start(self, config: Config, host: PluginHost, *, is_command: bool = False) -> None:
        search_frozen()  # an engine that was dropped gives its memory back
        config, known = with_model(config, host)
        self.config = config
        model = config.model.config
        tokenizer = locate(model.tokenizer) if model.tokenizer else None  # a mistake here costs no start-up

        def _begin(resolved: ResolvedConfig, structured_output: StructuredOutput) -> None:
            self._begin_text(resolved, structured_output, tokenizer)

        built = build_engine(config, host, is_command=is_command, checkpoint=known, on_resolved=_begin)
        self.engine: Engine = built.engine
        self.device, self.kernels_name = built.resolved.device, built.resolved.kernels.name
        self.captured = {
            "decodes": built.resolved.uses_graphs,
            "prompts": built.resolved.captures_prompts,
            "prompt_tokens": built.resolved.captured_prompt_tokens,
            "joined_decodes": config.engine.joined_decodes,
        }
        limits, checkpoint = self.engine.limits, built.resolved.checkpoint
        self.codec.limit_prompts(limits.max_len)
        limits.extensions.use_tokenizer(partial(token_texts, self.codec, limits.vocab_size))
        if self.structured_output.is_preparing:
            with built.phases.part("grammars"):
                self.structured_output.wait_until_prepared()
        guard = StepGuard(self.engine, config.engine, chosen_entries(config, host))
        self.output_processor = OutputProcessor(self.engine, self.codec, guard)
        self._end = weakref.finalize(self, _close_dropped, self.output_processor)
        if config.engine.freeze_gc:
            self.output_processor.freeze_heap()
        built.phases.end()
        self.start_phases_s: Mapping[str, float] = built.phases.seconds
        """Seconds that the parts of the start took, by their names; in a command since the process was started."""
        logger.info("engine start: %s", built.phases)
        if checkpoint.tokenizer_eos is not None:
            logger.warning(
                "the tokenizer's eos_token, %s (id %d), ends completions, too, though neither config.json nor "
                "generation_config.json names it; model.hf_overrides.eos_token_id says what does",
                *checkpoint.tokenizer_eos,
            )
        if checkpoint.sampling_defaults:
            defaults = ", ".join(f"{name}={value:g}" for name, value in checkpoint.sampling_defaults.items())
            logger.info("where sampling parameters are not set, generation_config.json decides: %s", defaults)
        if checkpoint.is_packaged and model.weights == "checkpoint":
            reference = checkpoint.reference.removeprefix("package:")
            logger.warning(
                "using the bundled checkpoint %s, a toy that checks an installation; model.checkpoint=FOLDER or a "
                "preset takes a real one",
                reference,
            )

    def _begin_text(
        self, resolved: ResolvedConfig, structured_output: StructuredOutput, tokenizer: Path | None
    ) -> None:
        """Set up the tokenizer before the weights are loaded. tokenizer: its folder, if it is not the checkpoint's."""
        checkpoint, vocab_size = resolved.checkpoint, resolved.spec.vocab_size
        folder, source = (tokenizer, None) if tokenizer else (checkpoint.folder, checkpoint.source)
        self.tokenizer_folder = folder
        """Where the tokenizer's files are; None if there are none, or if the model brought its own source."""
        self.codec = Codec(folder, source=source, chat=self.config.model.config.chat)
        facts = partial(grammar_vocabulary, self.codec, eos_token_ids(resolved), vocab_size)
        structured_output.use_vocabulary(facts)
        self.structured_output = structured_output
        wanted = self.config.engine.prepare_grammars
        if self._SERVES if wanted is None else wanted:
            structured_output.prepare()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | ProgressBar | None = None,
        **options: Unpack[EachOptionKeys],
    ) -> list[RequestOutput]:
        """Complete prompts and return one output each, in their order.

        A prompt that cannot be served yields an output with finish_reason "error" and its reason; the others run on.
        Whatever interrupts the call, its requests are gone afterwards. All arguments but `progress` are one value for
        all prompts, or a list with one each.

        Args:
            prompts: a text, a list of token ids or a list of chat messages, or a list of such.
            params: None means SamplingParams(). With n > 1 an output's `completions` are n.
            priority: for schedulers that heed it; lower is more urgent.
            tags: what to call the requests by, e.g. `{"tenant": "acme"}`: at most 8, for schedulers, observers and
                reports.
            deadline_s: by when each should be done, in seconds after it is queued: a wish, which schedulers may heed.
            cache_salt: at most 256 characters; a request finds only those prefixes in the cache that have the same
                salt.
            timeout_s: ends each request this many seconds after it is queued, with finish_reason "abort" and the tokens
                that it has by then.
            progress: True shows a bar on standard error; or an object that is told of each step.

        Returns:
            One output for each prompt, in the order of the prompts.

        Raises:
            RequestError: if a list with one each is not as long as prompts, or progress is no bar.
            PluginError: if a plugin fails in a step, with the plugin's error as the cause; PlanError if the plugin is
                the scheduler.
            RankError: if a rank is lost.
        """
        return self._call(prompts, params, options).outputs(progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations by the checkpoint's chat template: `generate` for messages alone.

        Args:
            messages: a list of messages such as `{"role": "user", "content": "Hello"}`, or a list of such lists.
            params: as of `generate`.
            **options: the other arguments of `generate`.

        Returns:
            One output for each conversation.

        Raises:
            RequestError: if messages are no conversations; as `generate` does.
        """
        chats = as_prompts(messages)
        if not all(map(is_chat, chats)):
            example = '[{"role": "user", "content": "Hello"}]'
            raise RequestError(f"messages={shown(messages)} are no conversation; write {example}, or use generate")
        return self.generate(chats, params, **options)

    def __repr__(self) -> str:
        checkpoint = self.engine.model_name.removeprefix("package:")
        return f"{type(self).__name__}({checkpoint!r}, device={str(self.device)!r})"

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cumulative: bool = False,
        **options: Unpack[EachOptionKeys],
    ) -> Iterator[Delta]:
        """Complete prompts and yield what each step adds to any of them; arguments as for `generate`.

        The last Delta of a completion has its output, refused prompts included. Text deltas put together give exactly
        the output's text. Steps are done as the iterator is asked; when it is closed or dropped, its requests end.

        `cumulative`: a Delta's text is all text so far, not only the new text.

        Raises:
            HooklineError: as `generate` does.
        """
        return self._call(prompts, params, options, follows=True, is_cumulative=cumulative).run()

    def _call(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: EachOptionKeys,
        **ways: bool,
    ) -> Call:
        wanted = as_prompts(prompts)
        each = params_each(params, SamplingParams, len(wanted)), options_each(len(wanted), **options)
        return Call(self.output_processor, [Asked(*one) for one in zip(wanted, *each, strict=True)], **ways)

    @property
    def observers(self) -> dict[str, Any]:
        """The observers that the configuration names, by name."""
        return self.engine.observers.chosen

    def enter_thread(self) -> None:
        """Let the calling thread drive the engine; a device is current in one thread only."""
        if self.device.type == "cuda" and self.engine.executor.is_here:
            import torch

            torch.cuda.set_device(self.device)

    def device_works(self) -> bool:
        """Whether the device still computes: after some errors a GPU does nothing more for this process."""
        if self.device.type != "cuda" or not self.engine.executor.is_here:
            return True
        import torch

        try:
            torch.cuda.synchronize(self.device)
        except Exception:
            return False
        return True

    def close(self) -> None:
        """End what still runs and release the engine's memory; a second call does nothing.

        An LLM that is dropped without it is closed when Python collects it, or ends.
        Raises: PluginError for an observer that was switched off, or that fails now, once all is released.
        """
        self._end.detach()
        self.output_processor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PluginError as fault:
            if error is None:
                raise
            logger.error("%s", fault)  # logged, so that the error of the `with` block is the one that is raised


class ServingLLM(LLM):
    """The LLM of a server or an AsyncLLM, which prepares first uses at its start so that they never stop streams."""

    _SERVES = True


def _close_dropped(output_processor: OutputProcessor) -> None:
    """Close the engine of an LLM that was dropped. There is no caller to raise to, so errors go to the log."""
    try:
        output_processor.close()
    except HooklineError as error:
        logger.error("while closing an engine that was dropped: %s", error)
