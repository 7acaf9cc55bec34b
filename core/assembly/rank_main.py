"""The process of one further rank: builds its plugin host and worker from plain data, then computes what it is sent.

Decides nothing and knows no requests. It ends when it is told to, when it fails, and when its parent is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import asdict, replace
from typing import Any, NoReturn

from hookline.core.config.settings import Config
from hookline.core.distributed.heartbeat import Pulse
from hookline.core.executor.messages import Line, send_message
from hookline.core.executor.rank_loop import _compute, _live, _report, _shared, _waiter
from hookline.core.executor.ring import RingReader
from hookline.core.plugin.registry import KINDS, Option


def config_tree(config: Config, kernels: str) -> dict[str, Any]:
    """The configuration as the plain tree that `core.config.settings.validate` reads again in another process; no observers.

    kernels: the entry that was chosen, since one process chooses for all.
    """
    options: dict[str, Option] = {kind: getattr(config, kind) for kind in KINDS}
    tree: dict[str, Any] = {kind: _option(option) for kind, option in options.items()}
    tree["kernels"]["name"] = kernels
    plain = {"tp": config.tp, "seed": config.seed, "dtype": config.dtype, "device": config.device}
    return {**tree, **plain, "engine": asdict(config.engine)}


def _option(option: Option) -> dict[str, Any]:
    return {"name": option.name, **({} if option.config is None else asdict(option.config))}


def main(fd: int) -> NoReturn:
    """Run one rank over the inherited socket `fd`; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, and what it means is the parent's to say
    parent = socket.socket(fileno=fd)
    try:
        task = Line(parent).first()
    except ConnectionError:
        os._exit(1)
    pulse = Pulse(_shared(task), task["rank"])
    threading.Thread(target=_live, args=(parent, pulse), daemon=True).start()
    try:
        _serve(parent, task, pulse)
    except BaseException as error:
        _report(parent, error)
        os._exit(1)
    # No destructors: those of collectives wait for ranks that may have ended already.
    sys.stderr.flush()
    os._exit(0)


def _serve(parent: socket.socket, task: dict[str, Any], pulse: Pulse) -> None:
    import torch

    from hookline.core.assembly.choice import choose
    from hookline.core.assembly.worker import build_worker
    from hookline.core.config.settings import chosen_entries, validate
    from hookline.core.distributed.process_group import connect, join
    from hookline.core.plugin.blame import Blaming
    from hookline.core.plugin.host import PluginHost
    from hookline.core.requests.logits_processing import Processing

    torch.set_num_threads(task["num_threads"])
    host = PluginHost.load()
    host.check_same(task["plugins"], f"rank {task['rank']}")
    config, wait = validate(task["config"], host), _waiter(parent)
    with Blaming(chosen_entries(config, host), "while starting"):
        choice = choose(config, host, task["rank"])
        send_message(parent, {"here": True})
        wait()  # until every rank is there
        ranks = connect(join(task["port"]), choice.ranks, choice.device, pulse)
        worker = build_worker(replace(choice, ranks=ranks), Processing.of(host.registry, choice.facts))
    reader = RingReader(_shared(task)[task["ring_start"] :], choice.ranks.size - 1, task["rank"] - 1)
    send_message(parent, {"ready": True})
    _compute(worker, reader, wait, pulse)
    if choice.device.type == "cuda":
        torch.cuda.synchronize(choice.device)
