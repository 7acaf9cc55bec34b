"""A plugin for tests: a step extension that has every method, HOOKLINE_PLUGINS=tests.probing_extension.

It adds a direction to the stream after some layers, forbids a token, and tells of each token what it saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.core.contracts import API_VERSION as CURRENT
from hookline.core.contracts import Needs, StepExtension, hookimpl

API_VERSION = CURRENT
FORGOTTEN: list[dict] = []
"""The states of the requests that ended, in this process."""


@dataclass
class ProbeConfig:
    changed: list[int] = field(default_factory=lambda: [1])
    read: list[int] = field(default_factory=lambda: [0, 2])


@dataclass
class ProbeArguments:
    strength: float = 0.0
    forbidden: int = -1
    stops_after: int = 0
    breaks: int = 0
    """Raises in after_layer (1), after_draw (2), on_result (3) or forget (4)."""


def direction(hidden_size):
    import torch

    return torch.sin(torch.arange(hidden_size, dtype=torch.float32) * 1.7)


class Probe(StepExtension):
    result_dtype = "float32"

    def __init__(self, spec):
        self.layers, self.reads_layers = tuple(spec.config.changed), tuple(spec.config.read)
        self.result_width = 2 + len(self.reads_layers)
        self.direction_D = direction(spec.hidden_size).to(spec.device, spec.dtype)
        self.logits_of, self.is_cpu = spec.logits_of, spec.device.type == "cpu"

    def after_layer(self, layer, hidden_TD, rows):
        if self.is_cpu and int(rows.columns["breaks"].max()) == 1:
            raise ValueError("after a layer")
        strength_T1 = rows.columns["strength"].to(hidden_TD.dtype).unsqueeze(1)
        return hidden_TD.addcmul_(strength_T1, self.direction_D)

    def before_draw(self, logits_NV, rows):
        import torch

        forbidden_N1 = rows.columns["forbidden"].unsqueeze(1)
        penalty_N1 = torch.where(forbidden_N1 >= 0, -torch.inf, 0.0)
        return logits_NV.scatter_add_(1, forbidden_N1.clamp(min=0), penalty_N1)

    def after_draw(self, tokens_N, rows):
        import torch

        if self.is_cpu and int(rows.columns["breaks"].max()) == 2:
            raise ValueError("after a draw")
        sums = [rows.streams[layer].float().sum(1) for layer in self.reads_layers]
        best_N = self.logits_of(rows.streams[self.reads_layers[0]]).argmax(1)
        return torch.stack([tokens_N.float(), best_N.float(), *sums], dim=1)

    @staticmethod
    def start(arguments, request):
        return {"seen": [], "told": 0, "arguments": arguments}

    @staticmethod
    def on_result(state, values_W):
        state["told"] += 1
        if state["arguments"].breaks == 3 and state["told"] == 2:
            raise ValueError("on a result")
        token_id, best, *sums = values_W.tolist()
        return {"token": int(token_id), "best": int(best), "sums": sums}

    @staticmethod
    def on_token(state, token_id, logprob):
        state["seen"].append(token_id)
        assert state["told"] == len(state["seen"])
        return "enough" if len(state["seen"]) == state["arguments"].stops_after else None

    @staticmethod
    def forget(state):
        FORGOTTEN.append(state)
        if state["arguments"].breaks == 4:
            raise ValueError("when it forgets")


@hookimpl
def register_extensions(register):
    register(
        "probe",
        "tests.probing_extension:Probe",
        arguments=ProbeArguments,
        config=ProbeConfig,
        help="strength, forbidden: for tests",
        needs=Needs(graph_safe=True),
    )
