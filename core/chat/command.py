"""The command `hookline chat`: from a command line to a conversation. Bare at import, as its package says."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.core.cli.command import guarded, is_sweep
from hookline.core.cli.output import require_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments, name="chat")


def _run(arguments: list[str]) -> int:
    from hookline.core.chat.settings import ChatKeys, validate_chat
    from hookline.core.config.compose import compose
    from hookline.core.errors import ConfigError
    from hookline.core.plugin.host import PluginHost

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        raise ConfigError("a conversation has one configuration; leave out -m (--multirun)")
    jobs = compose(arguments, host, ChatKeys, "chat", positional="model")
    if not jobs:
        return 0
    run = validate_chat(jobs[0].tree, host)
    require_output()

    from hookline.core.assembly.compiler_child import begin_early

    begin_early(run.config)
    from hookline.core.chat.conversation import Conversation
    from hookline.core.chat.terminal import Terminal
    from hookline.core.frontend.llm import LLM

    with LLM.from_config(run.config, host) as llm:
        terminal = Terminal(Conversation(llm, run))
        terminal.run()
    return terminal.exit_code
