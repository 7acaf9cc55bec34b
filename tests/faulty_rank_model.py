"""The model of tests/faulty_rank.py."""

import os
import signal
import time

import torch

from hookline.core.distributed.heartbeat import COMPILERS
from hookline.core.errors import CapacityError
from hookline.plugins.models.qwen3 import Qwen3
from tests.faulty_rank import fault

SLOW_S = 4.0
SPIN_CYCLES = 60_000_000_000
"""Half a minute of a GPU."""


class FaultyQwen3(Qwen3):
    def __init__(self, hf_config, runtime):
        self.rank, self.num_forwards = runtime.stage.index * runtime.ranks.size + runtime.ranks.rank, 0
        act(fault(self.rank, "0"))
        super().__init__(hf_config, runtime)

    def forward(self, token_ids_T, positions_T, attend):
        self.num_forwards += 1
        what = fault(self.rank, str(self.num_forwards), f"T{len(token_ids_T)}")
        act(what)
        hidden_XD = super().forward(token_ids_T, positions_T, attend)
        if what == "nan":
            hidden_XD[-1] = torch.nan
        return hidden_XD


def act(what):
    if what == "raise":
        raise ValueError("a bug in this rank")
    if what == "memory":
        raise CapacityError("no room for a KV cache here")
    if what == "exit":
        os._exit(3)
    if what in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, what))
    if what == "hang":
        time.sleep(3600)
    if what == "loop":
        loop_for_ever()
    if what == "spin":
        torch.cuda._sleep(SPIN_CYCLES)
    if what == "slow":
        time.sleep(SLOW_S)
    if what == "compile":
        names = {"__name__": COMPILERS[0], "wait": time.sleep}
        exec(f"wait({SLOW_S})", names)


def loop_for_ever():
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue
