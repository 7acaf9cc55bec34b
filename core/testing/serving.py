"""A server whose engine has no model: all processes, sockets and the step loop are real, the tokens are made up.

`python -c "from hookline.core.testing.serving import main; main()" serve.port=0 ...` takes the keys of
`hookline serve`. With `exact`, tokens come from `hookline.core.testing.fakes.completion`, so a test knows the tokens of
each stream.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hookline.core.checkpoint.locate import locate
from hookline.core.config.settings import Config, validate
from hookline.core.contracts import Limits
from hookline.core.engine.engine import Engine
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.admission import EngineLimits
from hookline.core.serve.processes.engine_main import run
from hookline.core.simulate.executor import BlankExecutor
from hookline.core.step.executor import Executor, StepResult
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock
from hookline.core.testing.fakes import FakeExecutor
from hookline.core.tokenizer.codec import Codec

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM

VARIABLE = "HOOKLINE_MOCK"
"""Options of mock_llm as JSON, for the engine's process."""
ENGINE = "hookline.core.testing.serving:engine_main"
"""The main function of the engine's process."""
BLOCK_SIZE = 16
"""Tokens of a block of the mock's cache."""


class PacedExecutor(Executor):
    """Gives another executor's tokens `step_s` seconds after a step's launch; fails after `fail_after` steps."""

    def __init__(self, inner: Executor, step_s: float, fail_after: int | None = None, low: int = 0) -> None:
        self._inner, self._step_s, self._steps_left, self._low = inner, step_s, fail_after, low

    def launch(self, step: Step) -> Any:
        """See Executor. Raises: RuntimeError once the steps that `fail_after` allows are over."""
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise RuntimeError("the mock engine was asked to fail")
        handle = time.monotonic() + self._step_s, self._inner.launch(step)
        if isinstance(self._inner, FakeExecutor):
            self._inner.steps.clear()  # a test of a server lasts long
        return handle

    def collect(self, handle: Any) -> StepResult:
        """See Executor."""
        ready_s, inner = handle
        time.sleep(max(0.0, ready_s - time.monotonic()))
        result = self._inner.collect(inner)
        return replace(result, tokens=np.maximum(result.tokens, self._low))

    def time_steps(self) -> Clock:
        """See Executor."""
        return self._inner.time_steps()

    def close(self) -> None:
        """See Executor."""
        self._inner.close()


def mock_llm(
    config: Config,
    *,
    step_s: float = 0.0,
    exact: bool = False,
    vocab_size: int = 1000,
    max_num_seqs: int = 2048,
    fail_after: int | None = None,
    low: int = 0,
    dies: bool = False,
) -> LLM:
    """The parts of an LLM that the server's engine process uses, without a model, with the bundled tokenizer.

    low: the smallest token, e.g. 256: no single bytes. fail_after: steps after which each further one raises. dies: as
    if the device did nothing more then.
    """
    limits = Limits(max_num_seqs, max(16384, max_num_seqs), config.engine.max_model_len, BLOCK_SIZE, num_blocks=65536)
    inner = FakeExecutor(limits, vocab_size) if exact else BlankExecutor(vocab_size)
    assert config.scheduler.entry is not None
    engine = Engine(
        config.scheduler.entry.load()(config.scheduler.config),
        PacedExecutor(inner, step_s, fail_after, low),
        BlockPool(limits.num_blocks, BLOCK_SIZE),
        EngineLimits(limits, vocab_size, 30.0, max_queued_requests=config.engine.max_queued_requests),
        model_name="mock",
    )
    folder = locate(config.model.config.checkpoint)
    mock = SimpleNamespace(engine=engine, observers={}, tokenizer_folder=folder, close=engine.close, config=config)
    mock.device_works = lambda: not dies
    mock.structured_output = SimpleNamespace(choice=None)
    mock.output_processor = OutputProcessor(engine, Codec(folder))
    return cast("LLM", mock)


def engine_main() -> int:
    """The main function of the engine's process: `core.serve.processes.engine_main` around a mock."""
    return run(_load)


def _load(tree: dict[str, Any]) -> LLM:
    return mock_llm(validate(tree, PluginHost.load()), **json.loads(os.environ.get(VARIABLE, "{}")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a server with such an engine, and end the process with its exit code."""
    from hookline.core.serve.command import main as serve

    sys.exit(serve(arguments, engine=ENGINE))
