"""`hookline bench workload=NAME`: the speed of a configuration under a load, as a table and one JSON line.

With `url=`, of a server. Bare at import. Start-up and a warm-up request are measured apart; the best of the timed
repetitions counts. A prompt is a list of token ids and no text is made, so the engine alone is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookline.core.bench.facts import ENGINE_FACTS, describe, describe_engine, first_token_s, peak_memory
from hookline.core.cli.output import say

if TYPE_CHECKING:
    from hookline.core.bench.recorder import Recording
    from hookline.core.bench.remote.settings import Address, ClientConfig
    from hookline.core.bench.settings import BenchKeys
    from hookline.core.bench.slo import Slo
    from hookline.core.bench.workload import Load, WorkloadConfig
    from hookline.core.config.settings import Config
    from hookline.core.engine.engine import Engine
    from hookline.core.frontend.llm import LLM
    from hookline.core.frontend.profiling import Profile
    from hookline.core.plugin.host import PluginHost

    Measure = Callable[[Mapping[str, Any], PluginHost], tuple[dict[str, Any], Recording]]
    Encode = Callable[[str], list[int]]

SHOWN = (
    "seconds",
    "output_tok_s",
    "prompt_tok_s",
    "requests_s",
    "goodput_s",
    "steps",
    "prefix_hit_rate",
    "preemptions",
)
OBJECTIVE_KEYS = ("objective", "slo", "workload", "experiment")
"""Root keys that decide whether a result has the objective's figure."""
SPREADS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "busy_s", "pool_usage")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, as `hookline run` does."""
    from hookline.core.cli.command import guarded

    return guarded(run_benchmarks, arguments)


def run_benchmarks(
    arguments: list[str], name: str = "bench", measure_: Measure | None = None, keys: type[BenchKeys] | None = None
) -> int:
    """Run the job or the sweep that a command line of `core.{name}` asks for; returns the exit code.

    name: of the command and of its configuration. measure_: as for `execute`. keys: its root keys; None: BenchKeys.
    """
    from hookline.core.bench.settings import BenchKeys
    from hookline.core.cli.command import is_sweep
    from hookline.core.config.compose import compose
    from hookline.core.plugin.host import PluginHost
    from hookline.core.sweep.sweep import run_sweep

    keys = keys or BenchKeys
    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        check_study(arguments, host, keys, name)
        return run_sweep(arguments, host, keys, name)
    jobs = compose(arguments, host, keys, name)
    return execute(jobs[0].tree, host, measure_) if jobs else 0


def check_study(arguments: Sequence[str], host: PluginHost, keys: type[BenchKeys], name: str) -> None:
    """Refuse a study whose objective no trial can have, before the first one runs.

    If keys that the objective depends on are swept, or the configuration cannot be composed without the swept keys,
    nothing is checked here, and each trial reports the error itself.
    Raises: ConfigError with the near miss or the fix.
    """
    from hookline.core.bench.metrics import check_objective
    from hookline.core.bench.slo import Slo
    from hookline.core.bench.workload import workload_of
    from hookline.core.config.compose import compose
    from hookline.core.config.schema import build
    from hookline.core.errors import HooklineError
    from hookline.core.sweep.hydra_settings import fixed_arguments, is_study

    fixed = fixed_arguments(arguments, OBJECTIVE_KEYS) if is_study(arguments) else None
    if fixed is None:
        return
    try:
        [job] = compose(fixed, host, keys, name)
        slo, workload = build(Slo, job.tree.get("slo") or {}, "slo"), workload_of(job.tree.get("workload") or {})
    except HooklineError:
        return
    check_objective(str(job.tree.get("objective") or keys.objective), slo, workload)


def execute(tree: Mapping[str, Any], host: PluginHost, measure_: Measure | None = None) -> int:
    """Run the benchmark a tree describes, show its result and write the files it names.

    measure_: does so in place of `measure`.
    Raises: HooklineError for whatever keeps the engine from starting or running; a line of `result` says so, too.
    """
    from hookline.core.bench.files import make_records_folder, write_recording
    from hookline.core.sweep.job_status import failure
    from hookline.core.sweep.results import append_line, check_appendable
    from hookline.core.util.files import path_of

    result, records = (None if tree.get(key) is None else path_of(tree[key]) for key in ("result", "records"))
    if records is not None:
        make_records_folder(records)  # the result may lie in it
    if result is not None:
        check_appendable(result, "result")
    try:
        record, recording = (measure_ or measure)(tree, host)
    except Exception as error:
        if result is not None:
            append_line(result, {**describe(tree), **failure(error)})
        raise
    try:
        if result is not None:
            append_line(result, record)
        if records is not None:
            write_recording(recording, records)
    finally:
        print_result(record)  # the work is done, and must not be lost with a file
    return 0


@dataclass(frozen=True)
class Bench:
    """A validated benchmark."""

    config: Config
    workload: WorkloadConfig
    slo: Slo
    objective: str
    repeats: int
    profile: Profile | None
    client: ClientConfig
    address: Address | None = None
    """Of the server that is measured in place of an engine."""


def measure(tree: Mapping[str, Any], host: PluginHost) -> tuple[dict[str, Any], Recording]:
    """Build the engine a tree describes, run its workload; returns the result line and the best repetition's record.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from hookline.core.assembly.compiler_child import begin_early

    bench = validate_bench(tree, host)
    if bench.address is not None:
        return measure_server(tree, bench, bench.address)
    begin_early(bench.config)
    from hookline.core.bench.metrics import extension_costs, speculation, summarise
    from hookline.core.frontend.llm import LLM
    from hookline.core.frontend.profiling import profiled
    from hookline.core.util.garbage import settled

    with LLM.from_config(bench.config, host) as llm, settled():
        start_s, encode = first_token_s(llm), encoder(llm)
        runs = [run_load(llm.engine, bench.workload, repetition, encode) for repetition in range(bench.repeats)]
        best = min(runs, key=lambda run: run.seconds)
        if bench.profile is not None:  # apart, since tracing takes time
            with profiled(llm, bench.profile):
                run_load(llm.engine, bench.workload, bench.repeats, encode)
        metrics = {**summarise(best, bench.slo), "start_to_first_token_s": round(start_s, 3), **peak_memory(llm)}
        if costs := extension_costs(llm.engine.extension_costs):
            metrics["extensions"] = costs
        if (counts := llm.engine.speculation) is not None:
            metrics["speculation"] = speculation(counts)
        return {**describe(tree), **describe_engine(llm), **outcome(bench, metrics)}, best


def measure_server(tree: Mapping[str, Any], bench: Bench, address: Address) -> tuple[dict[str, Any], Recording]:
    """Load a server and return the result line and the best repetition's record. Imports no torch.

    Raises: HooklineError if it does not answer or every request failed.
    """
    from hookline.core.bench.metrics import MACHINE
    from hookline.core.bench.remote.command import serve_load
    from hookline.core.bench.remote.recording import figures

    def _load_of(vocab_size: int, repetition: int) -> Load:
        return make_load(bench.workload, vocab_size, repetition)

    served = serve_load(address, bench.client, bench.workload, _load_of, bench.repeats)
    metrics = {**figures(served.recording, bench.slo), **dict.fromkeys(MACHINE)}
    facts = {
        "device": str(tree["url"]),
        **dict.fromkeys(ENGINE_FACTS),
        "server": served.server,
        "client": served.client,
    }
    return {**describe(tree), **facts, **outcome(bench, metrics)}, served.recording


def outcome(bench: Bench, metrics: dict[str, Any]) -> dict[str, Any]:
    """The part of a result line with a finished job's status, figures and objective."""
    from hookline.core.sweep.results import objective_value

    objective = {"name": bench.objective, "value": objective_value(metrics, bench.objective)}
    return {"status": "done", "error": None, "metrics": metrics, "objective": objective}


def validate_bench(tree: Mapping[str, Any], host: PluginHost, keys: type[BenchKeys] | None = None) -> Bench:
    """Check a tree. keys: the dataclass of its root keys; None: BenchKeys. Further keys' values are not checked.

    Raises: ConfigError or PluginError naming the key, the value and the fix.
    """
    from dataclasses import fields

    from hookline.core.bench.metrics import check_objective
    from hookline.core.bench.remote.settings import ClientConfig
    from hookline.core.bench.settings import BenchKeys
    from hookline.core.bench.slo import Slo
    from hookline.core.bench.workload import workload_of
    from hookline.core.config.schema import build, check_keys, plain_defaults
    from hookline.core.config.settings import ENGINE_KEYS, validate
    from hookline.core.errors import ConfigError
    from hookline.core.frontend.profiling import Profile, ProfileKeys
    from hookline.core.plugin.registry import KINDS
    from hookline.core.run.settings import RunKeys
    from hookline.core.util.ranges import check_ranges

    keys = keys or BenchKeys
    check_keys(tree, (*KINDS, *(one.name for one in fields(keys))))
    taken = (*ENGINE_KEYS, *(one.name for one in fields(ProfileKeys)))
    for key, default in plain_defaults(RunKeys).items():
        if key not in taken and tree.get(key, default) != default:
            raise ConfigError(f"{key} has no effect in a benchmark, whose requests are the workload's")
    if tree.get("job_timeout_s") is not None:
        raise ConfigError("job_timeout_s is for the jobs of a sweep; add -m, or leave it out")
    repeats = tree.get("repeats", keys.repeats)
    if isinstance(repeats, bool) or not isinstance(repeats, int):
        raise ConfigError(f"repeats={repeats!r} is not an int")
    check_ranges(keys, {"repeats": repeats})
    slo: Slo = build(Slo, tree.get("slo") or {}, "slo")
    objective = str(tree.get("objective") or keys.objective)
    workload = workload_of(tree.get("workload") or {})
    check_objective(objective, slo, workload)
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    client: ClientConfig = build(ClientConfig, tree.get("client") or {}, "client")
    bench = Bench(config, workload, slo, objective, repeats, Profile.of(tree), client, _server_address(tree, client))
    if bench.address is not None:
        _refuse_engine_keys(bench, validate({}, host))
    return bench


def _server_address(tree: Mapping[str, Any], client: ClientConfig) -> Address | None:
    from hookline.core.bench.remote.settings import Address, ClientConfig
    from hookline.core.errors import ConfigError

    if tree.get("url") is not None:
        return Address.of(tree["url"])
    if client != ClientConfig():
        raise ConfigError("client has no effect without url=, the server that it asks")
    return None


def _refuse_engine_keys(bench: Bench, default: Config) -> None:
    """Refuse engine keys beside `url`: the server has an engine of its own, on which they have no effect."""
    from hookline.core.errors import ConfigError

    for name, value in vars(default).items():
        if getattr(bench.config, name) != value:
            raise ConfigError(f"{name} has no effect beside url=, whose server has its own; leave it out")
    if bench.profile is not None:
        raise ConfigError("profile has no effect beside url=: another process computes")


def run_load(engine: Engine, workload: WorkloadConfig, repetition: int = 0, encode: Encode | None = None) -> Recording:
    """Serve one repetition of a workload from an empty prefix cache.

    encode: makes token ids of a trace's texts; None refuses them.
    Raises: RequestError if the engine refuses every request; a warning says so of some.
    """
    from hookline.core.bench.driver import drive
    from hookline.core.errors import RequestError

    engine.pool.reset_cache()
    engine.time_steps()
    load = make_load(workload, engine.limits.vocab_size, repetition, encode)
    recording = drive(engine, load)
    refused = [request.error for request in recording.requests if request.error is not None]
    if len(refused) == len(load.requests):
        raise RequestError(f"every request of the workload was refused: {refused[0]}")
    if refused:
        say(f"{len(refused)} of {len(load.requests)} requests were refused: {refused[0]}")
    return recording


def make_load(workload: WorkloadConfig, vocab_size: int, repetition: int, encode: Encode | None = None) -> Load:
    """The load of a repetition, drawn or read from a trace."""
    from hookline.core.bench.trace import read_trace
    from hookline.core.bench.workload import draw_load

    if workload.trace is None:
        return draw_load(workload, vocab_size, repetition)
    return read_trace(workload, vocab_size, repetition, encode)


def encoder(llm: LLM) -> Encode:
    """A function that tokenizes text."""
    return lambda text: list(llm.codec.encode(text))


def print_result(record: Mapping[str, Any]) -> None:
    """The figures as a table."""
    from hookline.core.bench.latencies import STATISTICS
    from hookline.core.bench.metrics import cost_lines, draft_line, time_lines
    from hookline.core.bench.tag_metrics import tag_lines

    metrics = record["metrics"]
    rows = {"device": record["device"], "kernels": record["kernels"], "scheduler": record["scheduler"]}
    rows |= {key: metrics[key] for key in (*SHOWN, "start_to_first_token_s")}
    if metrics["refused"]:
        rows["refused"] = metrics["refused"]
    for key, value in rows.items():
        if value is not None:
            print(f"{key:24} {value}")
    if metrics["step_times"] is not None:
        print(*time_lines(metrics["step_times"]), sep="\n")
    if "extensions" in metrics:
        print(*cost_lines(metrics["extensions"]), sep="\n")
    if "speculation" in metrics:
        print(draft_line(metrics["speculation"]))
    print(f"{'':24}" + "".join(f" {name:>10}" for name in STATISTICS))
    for key in SPREADS:
        if metrics[key] is not None:
            print(f"{key:24}" + "".join(f" {metrics[key][name]:10.4f}" for name in STATISTICS))
    if "by_tag" in metrics:
        print(*tag_lines(metrics["by_tag"]), sep="\n")
