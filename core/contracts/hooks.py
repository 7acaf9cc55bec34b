"""The pluggy markers and every hook Hookline calls.

Hooks stay off the hot path: registration runs once per process, and an observer's hook only if an observer implements
it. A plugin module marks its functions with `hookimpl` and sets `API_VERSION` at its top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pluggy

from hookline.core.contracts.needs import Needs

if TYPE_CHECKING:
    from hookline.core.contracts.observer import EngineView, RequestBegin, StepStats, TappedStates
    from hookline.core.outputs import RequestOutput
    from hookline.core.util.arrays import FloatArray

NO_NEEDS = Needs()
"""The default of `Registrar`: the entry works everywhere."""
API_VERSION = 2
"""Version of this interface, the public names of core. A plugin states the version that it was written for."""
PROJECT = "hookline"
"""pluggy project name, and the entry-point group that plugins are found in."""

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin module as the implementation of the hook of the same name."""


def hookspec(function: _Hook) -> _Hook:
    """Mark a function as a hook specification."""
    return _hookspec(function)


class Registrar(Protocol):
    """Adds one entry of one kind; bound to the plugin that calls it."""

    def __call__(
        self,
        name: str,
        target: str,
        *,
        config: type | None = None,
        help: str = "",
        needs: Needs = NO_NEEDS,
        priority: int = 0,
        replace: bool = False,
        architectures: tuple[str, ...] = (),
        methods: tuple[str, ...] = (),
        arguments: type | None = None,
    ) -> None:
        """Register `target` ("package.module:Class", imported only when chosen) under `name`.

        config:   a dataclass with a default for every field: the option's schema; None if it has no fields.
        help:     one line for `hookline info`.
        priority: `auto` takes the available entry with the highest; step extensions and logits processors with a
                  higher one run earlier; API surfaces with one above 0 are served where serve.apis is not set.
        replace:  take the place of the entry of the same name, or of entries that claim the same architectures. Without
                  it, a taken name is an error; so is model=auto for an architecture that two entries claim.
        architectures: for models: the checkpoints that model=auto serves with this entry, by the names that config.json
                  has in `architectures`; "*" means every architecture that no other entry claims.
        methods:  for quantizations: the checkpoints that quantization=auto reads with this entry, by the quant_method
                  of their config.json; of several entries it takes the one with the highest priority.
        arguments: for step extensions: the dataclass of a request's arguments, with a default for every field.
        """
        ...


@hookspec
def register_models(register: Registrar) -> None:
    """Add models.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", architectures=(...,)); the
             dataclass extends hookline.core.contracts.ModelConfig.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/models/__init__.py
    """


@hookspec
def register_schedulers(register: Registrar) -> None:
    """Add scheduler policies.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line").
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/schedulers/__init__.py
    """


@hookspec
def register_samplers(register: Registrar) -> None:
    """Add samplers.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", needs=Needs(...)).
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/samplers/__init__.py
    """


@hookspec
def register_processors(register: Registrar) -> None:
    """Add logits processors: they change the logits of the requests that ask for it, before the sampler draws.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ArgumentsDataclass, help="one line", needs=Needs(...),
             priority=...). The dataclass is the schema of the arguments. A request sets them by
             SamplingParams(extra_args={name: {...}}), an engine for all its requests by
             processors.name.field=value. Default values leave the logits as they are. If the dataclass extends
             hookline.core.contracts.FromSamplingParams, its fields are read from SamplingParams itself. Higher
             priorities run first.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/samplers/__init__.py
    """


@hookspec
def register_extensions(register: Registrar) -> None:
    """Add step extensions: they take part in the steps of the requests that ask for it.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", arguments=ArgumentsDataclass, config=ConfigDataclass,
             help="one line", needs=Needs(...), priority=...); the class is hookline.core.contracts.StepExtension.
             A request uses it by SamplingParams(extra_args={name: {...}}). The engine's extensions.name.field=value
             sets a field of `config`, or of `arguments` for all its requests; no field may be in both. Logits
             processors run among the extensions, in the order of the priorities, and share their names.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: examples/hookline-steering/hookline_steering/__init__.py
    """


@hookspec
def register_kernels(register: Registrar) -> None:
    """Add kernels, numerical back ends: norms, rotary embedding, KV-cache writes and paged attention.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", needs=Needs(...),
             priority=...).
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/kernels/__init__.py
    """


@hookspec
def register_observers(register: Registrar) -> None:
    """Add observers: objects that watch the engines whose configuration names them, `observers=[name]`.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", needs=Needs(...)); the
             class is hookline.core.contracts.Observer: any of the observer hooks below as methods.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/observers/__init__.py
    """


@hookspec
def register_reasoning_parsers(register: Registrar) -> None:
    """Add reasoning parsers: they tell a model's reasoning from its answer, for clients of a server.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line"); the class is
             hookline.core.contracts.OutputParser.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/parsers/__init__.py
    """


@hookspec
def register_tool_parsers(register: Registrar) -> None:
    """Add tool parsers: they find a model's tool calls in its answer, for clients of a server.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line"); the class is
             hookline.core.contracts.OutputParser.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/parsers/__init__.py
    """


@hookspec
def register_grammars(register: Registrar) -> None:
    """Add grammar back ends: they say which tokens may come next in a completion whose form is prescribed.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", needs=Needs(...),
             priority=...). The class is hookline.core.contracts.GrammarBackend; it is imported by the first request
             that sets SamplingParams.structured_outputs, or at the start of a server or an AsyncLLM. `grammars=auto`
             takes the one of the highest priority that can be used.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/grammars/__init__.py
    """


@hookspec
def register_poolers(register: Registrar) -> None:
    """Add poolers: they make one vector of a prompt's hidden states, for requests that embed, classify or score.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", needs=Needs(...)). The
             class is hookline.core.contracts.Pooler; it is imported by the first request that asks for it, and requests
             may ask for any that is registered. `pooler=auto` takes the one that the checkpoint's files call for.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/poolers/__init__.py
    """


@hookspec
def register_quantizations(register: Registrar) -> None:
    """Add quantizations: they read checkpoints whose matrices are stored in few bits, or quantise while loading.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", methods=(...,)). The class
             is hookline.core.contracts.Quantization, the dataclass extends
             hookline.core.contracts.QuantizationConfig. `quantization=auto` takes the one that has the checkpoint's
             quant_method among its methods; one without methods is used only if it is named.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/quantizations/__init__.py
    """


@hookspec
def register_apis(register: Registrar) -> None:
    """Add API surfaces: the endpoints of an API that a server has.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", priority=...). The class is
             hookline.core.contracts.ApiSurface; it is imported by a server whose `serve.apis` names it. Where that key
             is not set, the surfaces with a priority above 0 are served, the highest first.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/apis/__init__.py
    """


@hookspec
def register_drafters(register: Registrar) -> None:
    """Add drafters: they guess the next tokens of running requests, which a step then computes at once.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line"). The class is
             hookline.core.contracts.Drafter. Without `drafter=name` in the configuration no request has drafts.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/drafters/__init__.py
    """


@hookspec
def register_executors(register: Registrar) -> None:
    """Add executors: they find room for an engine's ranks in other places, such as a cluster, and start them there.

    When:    once per process, before any device is touched.
    Call:    register(name, "package.module:Class", config=ConfigDataclass, help="one line", needs=Needs(packages=...)).
             The class is hookline.core.contracts.RankExecutor. `engine.executor=name` chooses it, or
             {name: ..., field: value}; `local`, which no plugin can be named, are child processes of the engine's.
    Errors:  a duplicate name or a bad dataclass disables this plugin alone and names it.
    Example: plugins/executors/__init__.py
    """


@hookspec
def config_packages() -> list[str]:  # type: ignore[empty-body]
    """Name importable packages that hold YAML presets, laid out as conf/ is (model/, scheduler/, ...).

    When:    once per process of the command line, before Hydra composes. None or [] adds nothing.
    Errors:  a package that cannot be found disables this plugin alone and names it.
    """


@hookspec
def on_engine_start(engine: EngineView) -> None:
    """Observe an engine that is ready to take requests.

    When:    once per engine, in the process that plans, after the KV cache is allocated.
    Errors:  an exception stops the start and names the plugin.
    """


@hookspec
def on_request_begin(info: RequestBegin) -> None:
    """Observe a request that was queued. Each completion of a prompt is a separate request.

    When:    when the engine has accepted it, before any of it is planned. A refused request is reported to
             on_request_end alone. Costs nothing if no observer implements it.
    Errors:  as on_step_end.
    """


@hookspec
def on_first_token(info: RequestBegin, first_token_s: float) -> None:
    """Observe a request's first token. first_token_s: when it was known, on the engine's clock.

    When:    once for each request that gets a token, before on_step_end of that step. Costs nothing if no observer
             implements it.
    Errors:  as on_step_end.
    """


@hookspec
def on_token_gaps(gaps_s: FloatArray) -> None:
    """Observe how long requests waited for their next token.

    gaps_s: (N,) seconds between a token and the one before it, for each token of a step that is not its request's
    first; a preemption in between is part of the gap.
    When:    after a step's tokens are known, if N is at least 1. Costs nothing if no observer implements it.
    Errors:  as on_step_end.
    """


@hookspec
def on_hidden_states(states: TappedStates) -> None:
    """Observe the hidden states of a step after each of the layers that `engine.taps` names.

    When:    after a step was computed, before on_request_end of requests that end with it; only if engine.taps names
             layers. Costs nothing if no observer implements it.
    Errors:  as on_step_end.
    """


@hookspec
def on_step_end(stats: StepStats) -> None:
    """Observe one step.

    When:    after each step's tokens are committed. Costs nothing if no observer implements it.
    Errors:  an exception switches this observer off: of its hooks, only on_engine_stop is still called. One line in the
             log names the observer, requests go on, and closing the engine raises the exception.
    """


@hookspec
def on_request_end(output: RequestOutput) -> None:
    """Observe a request that finished, was refused or was aborted. Its output has tokens and no text.

    The output is the one that the caller gets: do not change it.

    When:    once per request and completion, after its blocks are given back.
    Errors:  as on_step_end.
    """


@hookspec
def on_engine_stop(engine: EngineView) -> None:
    """Observe an engine that is being closed.

    When:    once per engine, before its memory is released; also after an error.
    Errors:  an exception is reported after the engine is closed.
    """
