"""The main function of a server's engine process."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hookline.core.cli.command import PATIENT
from hookline.core.cli.logs import logging_to_stderr
from hookline.core.serve.processes.parent import Parent, die_with_parent

if TYPE_CHECKING:
    from hookline.core.errors import HooklineError
    from hookline.core.frontend.llm import LLM

    Load = Callable[[dict[str, Any]], LLM]

DEAD = 3
"""Exit code of a process whose engine was ended by a fault."""


def main() -> int:
    """Serve the engine of the task that comes over the inherited socket; returns the exit code."""
    return run(_load)


def run(load: Load) -> int:
    """The same with what `load` makes of the engine's configuration."""
    os.environ.setdefault(*PATIENT)
    die_with_parent()
    parent = Parent(int(sys.argv[1]))
    if parent.is_gone:  # it died before the kernel was asked to end us with it
        return DEAD
    if cores := parent.task.get("cores"):
        os.sched_setaffinity(0, cores)  # before torch counts them
    with logging_to_stderr():
        return _serve(parent, load)


def _load(tree: dict[str, Any]) -> LLM:
    from hookline.core.util.garbage import imports_kept

    with imports_kept():
        from hookline.core.assembly.compiler_child import begin_early
        from hookline.core.config.settings import validate
        from hookline.core.plugin.host import PluginHost

    host = PluginHost.load()
    config = validate(tree, host)
    begin_early(config)
    with imports_kept():
        from hookline.core.frontend.llm import ServingLLM

    return ServingLLM.from_config(config, host)


def _serve(parent: Parent, load: Load) -> int:
    from hookline.core.errors import HooklineError, show_traceback
    from hookline.core.serve.engine_client import facts_of
    from hookline.core.serve.engine_metrics import tell_of_metrics
    from hookline.core.serve.processes.engine_server import EngineServer

    def give_up(error: HooklineError) -> None:
        """From another thread than the engine's, which is stuck in a call that never ends."""
        parent.tell(dead=str(error))
        os._exit(DEAD)

    task = parent.task
    try:
        llm = load(task["config"])
    except HooklineError as error:
        show_traceback(error)
        parent.tell(failed=str(error))
        return DEAD
    try:
        if task["tells_of_metrics"]:  # one engine for all of a server's
            tell_of_metrics(llm.observers)
        server = EngineServer(llm, task["address"], task["max_requests"], lambda: parent.is_gone)
        server.tell_if_stuck(give_up)
        gc.collect()
        gc.freeze()  # the model's objects live on; looking through them at each collection would hold up steps
        parent.tell(ready=True, facts=asdict(facts_of(llm)))
        server.run()
    finally:
        llm.close()
    if server.death is not None:
        logging.getLogger("hookline").error("the engine is dead: %s", server.death)
        parent.tell(dead=server.death)
        return DEAD
    return 0
