"""From a command line to its results: what `hookline run` does. Bare at import, as its package says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hookline.core.cli.command import guarded, is_sweep
from hookline.core.cli.output import require_output, say

if TYPE_CHECKING:
    from hookline.core.outputs import RequestOutput
    from hookline.core.plugin.host import PluginHost
    from hookline.core.run.settings import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments, name="run")


def _run(arguments: list[str]) -> int:
    from hookline.core.config.compose import compose
    from hookline.core.plugin.host import PluginHost
    from hookline.core.run.settings import RunKeys, validate_run

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        from hookline.core.sweep.sweep import run_sweep

        return run_sweep(arguments, host, RunKeys)
    jobs = compose(arguments, host, RunKeys, positional="prompt")
    return execute(validate_run(jobs[0].tree, host), host) if jobs else 0


def execute(run: RunConfig, host: PluginHost) -> int:
    """Complete the prompts of a run and show the results; returns the exit code.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from hookline.core.assembly.compiler_child import begin_early

    begin_early(run.config)
    from hookline.core.frontend.generation import progress_bar
    from hookline.core.frontend.llm import LLM
    from hookline.core.frontend.profiling import profiled
    from hookline.core.request_options import LINE_KEYS, RequestOptions
    from hookline.core.run.results import failures, of_lines

    if run.output is None:
        require_output()
    good = [line for line in run.lines if not line.error]
    prompts, each = [line.prompt for line in good], [RequestOptions(**line.options) for line in good]
    with LLM.from_config(run.config, host) as llm, profiled(llm, run.profile):
        options: dict[str, Any] = {name: [getattr(one, name) for one in each] for name in LINE_KEYS}
        progress = progress_bar(len(good))
        if run.pooling is None:
            outputs = llm.generate(prompts, [line.params for line in good], **options, progress=progress)
        else:
            outputs = llm.embed(prompts, run.pooling, **options, progress=progress)
        outputs = of_lines(run.lines, outputs)
        show(run, outputs, is_chat=llm.config.model.config.chat)
    failed = failures(outputs)
    for line in failed:
        say(line)
    return 2 if failed else 0


def show(run: RunConfig, outputs: Sequence[RequestOutput], *, is_chat: bool = False) -> None:
    """Print or write the results, and their usage line."""
    from hookline.core.errors import ConfigError
    from hookline.core.run.results import print_text, usage_line, write_results

    if run.output is None:
        print_text(outputs, is_chat=is_chat)
    else:
        try:
            write_results(outputs, run.output)
        except ConfigError:
            print_text(outputs, is_chat=is_chat)  # the work is done, and must not be lost with the file
            raise
        say(f"wrote {len(outputs)} results to {run.output}")
    if run.usage:
        say(usage_line(outputs))
