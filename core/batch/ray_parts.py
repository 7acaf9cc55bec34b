"""Answers parts on Ray: a pool of Ray Data's actors with an engine each, which gives a dead actor's parts to another.

A part that was written before its actor died is not answered again; an unfinished part leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hookline.core.batch.input_folder import PARQUET
from hookline.core.batch.output_folder import OutputFolder
from hookline.core.batch.part_answers import PartAnswers
from hookline.core.batch.parts import Part
from hookline.core.batch.runner import Tally, recount
from hookline.core.batch.settings import BatchRun
from hookline.core.data.generate import leave, ranks_gpus
from hookline.core.errors import ConfigError, EngineError, clipped
from hookline.core.plugin.environment import check_here, environment
from hookline.core.plugin.host import PluginHost
from hookline.core.util.ray_cluster import connected_ray, last_line, node_here

ASKER = "batch.executor=ray"
"""The name of this feature in errors about a missing Ray."""
MAX_CAUSE = 600
"""Most characters of Ray's message when it gives up."""
MAX_DEATHS = 4
"""Most engines that may die over one part: a row that kills every engine must not be retried without end."""
logger = logging.getLogger("hookline")


class PartWorker:
    """An engine that answers parts, as the function of map_batches. The process ends with its engine.

    driver: the environment of the command, if that is another process.
    Raises: ConfigError if this node has another environment, or does not see the command's folders.
    """

    def __init__(self, run: BatchRun, driver: Mapping[str, Any] | None = None) -> None:
        host = PluginHost.load()
        if driver is not None:
            check_here(driver, node_here(), host)
            check_shared(run, node_here())
        self._answers, self._output, self._prefix = PartAnswers(run, host), OutputFolder(run.output), run.prefix
        self._in_flight: list[Part] = []

    async def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Answer the parts of a batch, which are rows of JSON; returns a tally for each."""
        found = []
        for text in batch["part"]:
            part = Part(**json.loads(str(text)))
            found.append(json.dumps({"part": asdict(part), "tally": asdict(await self._tally(part))}))
        return {"done": found}

    async def _tally(self, part: Part) -> Tally:
        """Answer a part, unless it is answered already."""
        path = self._output.path_of(part)
        if path.exists():
            return tally_of(path, part, self._prefix)
        self._in_flight.append(part)
        try:
            return await self._answers.answer(part)
        except EngineError as error:
            # All parts in progress are counted, because it is unknown which of them killed the engine.
            deaths = {one: self._output.count_death(one) for one in self._in_flight}
            if (most := max(deaths.values())) < MAX_DEATHS:
                leave(error)
            rows = [f"rows {one.first + 1} to {one.first + one.num_rows} of {one.file}" for one in self._in_flight]
            blamed = " and ".join(told for told, count in zip(rows, deaths.values(), strict=True) if count == most)
            raise EngineError(f"{most} engines ended while they answered {blamed}: {error}") from error
        finally:
            self._in_flight.remove(part)


def check_shared(run: BatchRun, node: str) -> None:
    """Check that this node sees the command's folders before its engine starts.

    Raises: ConfigError naming the node and the folder.
    """
    for folder, is_there in ((run.input, run.input.is_dir()), (run.output, OutputFolder(run.output).is_begun)):
        if not is_there:
            raise ConfigError(
                f"node {node} does not see {folder}: input and output must lie on a file system that all nodes share, "
                "under the same path"
            )


def tally_of(path: Path, part: Part, prefix: str) -> Tally:
    """The tally of a part that is written although the process that answered it has died since."""
    tally = Tally()
    if part.file.endswith(PARQUET):
        for number, row in enumerate(_answers_of(path, prefix), start=part.first + 1):
            if (error := row[f"{prefix}error"]) is not None:
                tally.fail_at(f"row {number}", error)
            else:
                tally.count(row.get(f"{prefix}num_completion_tokens"))
        return tally
    for line in path.read_bytes().splitlines():
        recount(tally, json.loads(line))
    return tally


def _answers_of(path: Path, prefix: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    wanted = [name for name in (f"{prefix}error", f"{prefix}num_completion_tokens") if name in names]
    found: list[dict[str, Any]] = pq.read_table(path, columns=wanted, partitioning=None).to_pylist()
    return found


def answered_on_ray(
    run: BatchRun, host: PluginHost, parts: Sequence[Part], at_once: int
) -> Iterator[tuple[Part, Tally]]:
    """Answer parts by run.replicas engines; yields each part with its tally when it is done.

    Raises: EngineError with Ray's message if Ray gives up; ConfigError if there is no Ray, or no cluster.
    """
    ray = connected_ray(ASKER)
    num_gpus = ranks_gpus(run.config, ASKER)
    warn_if_none_fits(ray, ASKER, run.num_cpus, num_gpus)
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    DataContext.get_current().enable_progress_bars = False
    rows = [{"part": json.dumps(asdict(part))} for part in parts]
    answered = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        PartWorker,
        fn_constructor_kwargs={"run": run, "driver": environment(host)},
        compute=ActorPoolStrategy(size=run.replicas, max_concurrent_calls_per_actor=at_once),
        batch_size=1,
        num_cpus=run.num_cpus,
        num_gpus=num_gpus,
    )
    try:
        for row in answered.iter_rows():
            done = json.loads(row["done"])
            yield Part(**done["part"]), Tally(**done["tally"])
    except RayError as error:
        raise EngineError(f"Ray gave up: {cause_of(str(error))}") from error


def warn_if_none_fits(ray: Any, asker: str, num_cpus: float, num_gpus: float) -> None:
    """Log a warning if no node of the cluster is large enough for one actor; it waits, since more nodes may come."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    sizes = [(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes]
    if not any(cpus >= num_cpus and gpus >= num_gpus for cpus, gpus in sizes):
        there = "; ".join(f"{cpus:g} and {gpus:g}" for cpus, gpus in sorted(set(sizes), reverse=True))
        wanted = f"an engine takes {num_cpus:g} CPUs and {num_gpus:g} GPUs of one node"
        logger.warning("%s waits: %s, and the nodes of this Ray cluster have %s", asker, wanted, there)


def cause_of(told: str) -> str:
    """The reason for which Ray gave up, from its traceback."""
    return clipped(last_line(told) or "it does not say why", MAX_CAUSE)
