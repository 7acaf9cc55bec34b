"""The console command `hookline`, which runs a command of core. `hookline key=value` is `hookline run key=value`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from hookline.core import COMMANDS

_PURPOSES = {
    "run": "complete prompts, or make vectors of them",
    "chat": "talk with a model in the terminal",
    "serve": "serve clients of OpenAI's and Anthropic's APIs over HTTP",
    "batch": "answer files and folders of requests",
    "bench": "measure the speed of an engine or a server under a load",
    "report": "show what came out of a sweep as a page",
    "simulate": "predict a benchmark, without a model or a GPU",
    "warm": "compile the kernels of an engine ahead of its start",
    "quantize": "write a checkpoint in few bits",
    "info": "list plugins, options, keys and presets",
    "new": "write a plugin to start from",
}
_OTHER_WORDS = {
    **dict.fromkeys(("generate", "complete", "completion", "predict"), "run"),
    **dict.fromkeys(("pull", "download"), "run model.checkpoint=OWNER/NAME"),
    **dict.fromkeys(("start", "up", "deploy"), "serve"),
    **dict.fromkeys(("list", "ls", "models", "plugins", "show"), "info"),
    **dict.fromkeys(("init", "create", "plugin"), "new"),
    "embed": "run task=embed",
    "run-batch": "batch",
    "benchmark": "bench",
    "sweep": "bench -m",
    "convert": "quantize",
    "compile": "warm",
}
"""What other programs call it, and newcomers type: word -> ours."""
_COMMANDS = "\n".join(f"  {name:<10}{_PURPOSES[name]}" for name in COMMANDS)
USAGE = f"""\
usage: hookline COMMAND [ARGUMENTS]
       hookline COMMAND --help            what a command takes
       hookline key=value ...             the same as hookline run key=value ...
       hookline --completion SHELL        completion for bash, zsh or fish, to be read by the shell
       hookline --version
commands:
{_COMMANDS}"""
"""What `hookline --help` prints."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:  # `help serve` is `serve --help`
        given = [*given[1:2], "--help"]
    first = given[0] if given else ""
    if first in ("--version", "version"):
        import hookline

        return _tell(f"hookline {hookline.__version__}")
    if first in ("--help", "-h"):
        return _tell(USAGE)
    if first == "--completion":
        from hookline.core.info.completion import SCRIPTS

        shell = given[1] if len(given) == 2 else ""
        if shell not in SCRIPTS:
            print(f"hookline: error: --completion takes one of {', '.join(SCRIPTS)}", file=sys.stderr)
            return 2
        return _tell(SCRIPTS[shell])
    if first == "--complete":
        from hookline.core.info.completion import candidates

        command, word = (*given[1:], "", "")[:2]
        return _tell("\n".join(candidates(command, word, COMMANDS)))
    is_word = not first.startswith("-") and first.replace("-", "_").isidentifier()
    if is_word and first not in COMMANDS:
        from hookline.core.util.text import near_miss

        meant = _OTHER_WORDS.get(first)
        hint = f" Did you mean '{meant}'?" if meant else near_miss(first, COMMANDS)
        print(f"hookline: error: no command '{first}'.{hint} Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = given.pop(0) if first in COMMANDS else "run"
    exit_code: int = import_module(f"hookline.core.{command}.command").main(given)
    return exit_code


def _tell(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        from hookline.core.cli.output import discard_output

        discard_output()
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
