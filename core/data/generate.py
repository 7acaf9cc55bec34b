"""`Generate`: an engine as the function of Ray Data's `Dataset.map_batches`. Imports Ray nowhere but in `options`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from hookline.core.config.schema import build
from hookline.core.config.settings import Config, validate
from hookline.core.data.admission import Admission
from hookline.core.data.requests import COMPLETION, RowReader
from hookline.core.data.row_answers import RowAnswers, engine_for_rows
from hookline.core.data.tables import rows_of, table_of, with_answers
from hookline.core.errors import ConfigError, EngineError, clipped, shown
from hookline.core.plugin.environment import check_here, environment
from hookline.core.plugin.host import PluginHost
from hookline.core.pooling_params import PoolingParams
from hookline.core.util.ray_cluster import connected_ray, imported_ray, node_here

if TYPE_CHECKING:
    import pyarrow

ASKER = "Generate.options"
"""The name of this feature in errors about a missing Ray."""
MAX_TOLD = 4000
"""Most characters of the last line that a process prints when it ends."""
CONCURRENT_BLOCKS = 4
"""Blocks that an engine answers at a time: while the last rows of one finish, others keep the engine full."""


class Generate:
    """Answers the rows of a data set: `rows.map_batches(Generate, **Generate.options({...}, concurrency=2))`.

    engine: keyword arguments of LLM, such as `checkpoint`, or a validated Config.
    task: "completion" of `prompt` (a text) or `prompt_token_ids`; "chat" with `messages`, a list of {role, content} or
    that as JSON; "structured", either of them in the form that `json_schema`, `structured_outputs` or sampling gives;
    "embeddings" of `prompt` or `prompt_token_ids`.
    sampling: SamplingParams of all rows, as a mapping; a row's columns `sampling`, `json_schema` and
    `structured_outputs` (mappings, or JSON) override it. A row without a seed gets one made of its prompt and place.
    pooling: PoolingParams of all vectors, as a mapping.
    max_rows: rows in flight; None: a tenth more than engine.max_num_seqs. Their prompts' tokens are bounded by what the
    KV cache holds and a tenth more.
    prefix: goes before the names of the new columns.
    driver: versions and plugins of the process that called `options`, which notes them: they must be the same here.

    All columns stay; new ones are `text`, `finish_reason`, `num_prompt_tokens`, `num_completion_tokens` and `error`, or
    for vectors `embedding`, `num_prompt_tokens` and `error`. A row that cannot be answered has its `error`, the others
    go on. If the engine dies, the process exits at once, since Ray repeats the blocks of an actor only if its process
    died.
    Raises: HooklineError for anything that cannot be used, with the value, the limit and the fix.
    """

    def __init__(
        self,
        engine: Mapping[str, Any] | Config | None = None,
        *,
        task: str = COMPLETION,
        sampling: Mapping[str, Any] | None = None,
        pooling: Mapping[str, Any] | None = None,
        max_rows: int | None = None,
        prefix: str = "",
        driver: Mapping[str, Any] | None = None,
    ) -> None:
        host = PluginHost.load()
        if driver is not None:
            check_here(driver, node_here(), host)
        config = engine if isinstance(engine, Config) else checked_config(engine or {}, host)
        self._task, self._prefix = task, prefix
        reader = _reader(task, sampling, pooling, config.seed)
        _check_prefix(prefix)
        self._llm = engine_for_rows(config, host, reader.wants_forms)
        self._answers = RowAnswers(self._llm, reader, Admission.of(self._llm.llm, max_rows))

    async def __call__(self, batch: Any) -> pyarrow.Table:
        """The rows of a batch with their answers, in their order, as an Arrow table."""
        table = table_of(batch)
        try:
            answers = await self._answers.answers(rows_of(table))
        except EngineError as error:
            leave(error)
        return with_answers(table, answers, self._task, self._prefix)

    async def aclose(self) -> None:
        """Release the engine, for callers whose process does not end with it."""
        await self._llm.aclose()

    @staticmethod
    def options(
        engine: Mapping[str, Any] | None = None,
        *,
        concurrency: int | tuple[int, int] = 1,
        batch_size: int | None = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """The arguments of map_batches. arguments: Generate's, which are checked here, before anything starts.

        concurrency: engines, one in an actor; (least, most) lets Ray add and remove them.
        batch_size: rows that are handed in together; None: half of engine.max_num_seqs, so that four such blocks keep
        the engine full. If an actor dies, the blocks that it was at are answered again: smaller ones lose less
        (repartition(target_num_rows_per_block=)).
        num_gpus: of each; None: as many as the engine has ranks if the cluster has GPUs and the device is not the CPU.
        To find that out, Ray is started if it is not: call ray.init, if you need it, before.
        Raises: HooklineError as Generate does, as far as it can be known without starting one.
        """
        host = PluginHost.load()
        config = checked_config(engine or {}, host)
        _check(arguments, config)
        imported_ray(ASKER)
        from ray.data import ActorPoolStrategy

        least, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
        return {
            "fn_constructor_kwargs": {"engine": config, "driver": environment(host), **arguments},
            "compute": ActorPoolStrategy(
                min_size=least, max_size=most, max_concurrent_calls_per_actor=CONCURRENT_BLOCKS
            ),
            "batch_size": batch_size or math.ceil(config.engine.max_num_seqs / 2),
            "batch_format": "pyarrow",
            "zero_copy_batch": True,
            "num_cpus": num_cpus,
            "num_gpus": ranks_gpus(config, ASKER) if num_gpus is None else num_gpus,
        }


def checked_config(engine: Mapping[str, Any], host: PluginHost) -> Config:
    """The configuration for LLM's keyword arguments.

    Raises: ConfigError or PluginError naming the key, the value and the fix.
    """
    if not isinstance(engine, Mapping):
        raise ConfigError(f"engine={shown(engine)} must be a mapping of what LLM takes as keyword arguments")
    tree = {key: value for key, value in engine.items() if value is not None}
    if (checkpoint := tree.pop("checkpoint", None)) is not None:
        model = tree.get("model") or {}
        tree["model"] = {**({"name": model} if isinstance(model, str) else model), "checkpoint": checkpoint}
    return validate(tree, host)


def _check(arguments: Mapping[str, Any], config: Config) -> None:
    allowed = ("task", "sampling", "pooling", "max_rows", "prefix")
    for name in arguments:
        if name not in allowed:
            raise ConfigError(f"unknown argument {name}={shown(arguments[name])}. Available: {', '.join(allowed)}")
    max_rows = arguments.get("max_rows")
    if max_rows is not None and not (isinstance(max_rows, int) and max_rows >= 1):
        raise ConfigError(f"max_rows={shown(max_rows)} must be at least 1, or None")
    _check_prefix(arguments.get("prefix", ""))
    _reader(arguments.get("task", COMPLETION), arguments.get("sampling"), arguments.get("pooling"), config.seed)


def _reader(task: str, sampling: Any, pooling: Any, seed: int) -> RowReader:
    """The reader of the rows.

    Raises: HooklineError for an invalid task or invalid parameters.
    """
    for name, given in (("sampling", sampling), ("pooling", pooling)):
        if not isinstance(given, Mapping | None):
            raise ConfigError(f"{name}={shown(given)} must be a mapping of parameters, or None")
    return RowReader(task, dict(sampling or {}), build(PoolingParams, pooling or {}, "pooling"), seed)


def _check_prefix(prefix: Any) -> None:
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix={shown(prefix)} must be a text")


def ranks_gpus(config: Config, asker: str) -> int:
    """GPUs of an engine: one for each rank if the cluster has any and the device is not the CPU.

    Raises: ConfigError that begins with `asker` if there is no cluster.
    """
    if config.device == "cpu":
        return 0
    return config.num_ranks if connected_ray(asker).cluster_resources().get("GPU") else 0


def leave(error: EngineError) -> NoReturn:
    """End this process at once, so that Ray starts another one and tries the rows again there."""
    said = clipped(f"the engine ended, and this process with it: {error}", MAX_TOLD)
    print(f"hookline: error: {said}", file=sys.stderr, flush=True)
    os._exit(1)
