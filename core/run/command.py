"""From a command line to its results: what `core.run` does. Bare at import, as its package says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookline.core.cli.command import guarded, is_sweep

if TYPE_CHECKING:
    from hookline.core.outputs import RequestOutput
    from hookline.core.plugin.host import PluginHost
    from hookline.core.run.settings import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments)


def _run(arguments: list[str]) -> int:
    from hookline.core.config.compose import compose
    from hookline.core.plugin.host import PluginHost
    from hookline.core.run.settings import RunKeys, validate_run

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        from hookline.core.sweep.sweep import run_sweep

        return run_sweep(arguments, host, RunKeys)
    jobs = compose(arguments, host, RunKeys)
    return execute(validate_run(jobs[0].tree, host), host) if jobs else 0


def execute(run: RunConfig, host: PluginHost) -> int:
    """Complete the prompts of a run and show the results; returns the exit code.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from hookline.core.frontend.llm import LLM
    from hookline.core.frontend.profiling import profiled
    from hookline.core.frontend.progress import progress_bar
    from hookline.core.request_info import NOT_SAID
    from hookline.core.run.results import refusals

    with LLM.from_config(run.config, host) as llm, profiled(llm, run.profile):
        infos = {name: [info.get(name, default) for info in run.infos] for name, default in NOT_SAID.items()}
        outputs = llm.generate(run.prompts, run.params, **infos, progress=progress_bar(len(run.prompts)))
        show(run, outputs)
    refused = refusals(outputs)
    for line in refused:
        print(f"hookline: {line}", file=sys.stderr)
    return 2 if refused else 0


def show(run: RunConfig, outputs: Sequence[RequestOutput]) -> None:
    """Print or write the results, and what they took."""
    from hookline.core.run.results import print_text, usage_line, write_json_lines

    if run.output is None:
        print_text(outputs, is_chat=run.config.model.config.chat)
    else:
        write_json_lines(outputs, run.output)
        print(f"hookline: wrote {len(outputs)} results to {run.output}", file=sys.stderr)
    if run.usage:
        print(f"hookline: {usage_line(outputs)}", file=sys.stderr)
