"""The options of tests/faulty_exit.py."""

import torch

from hookline.core import contracts
from hookline.core.contracts import LogitsProcessor
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.models.qwen3 import Qwen3
from hookline.plugins.samplers.gumbel import Gumbel
from hookline.plugins.schedulers import PrefillFirstConfig
from hookline.plugins.schedulers.prefill_first import PrefillFirst
from tests.faulty_exit import act, this_rank


class Scheduler(PrefillFirst):
    def __init__(self, config):
        act("scheduler.__init__")
        super().__init__(PrefillFirstConfig())

    def plan(self, view):
        act("scheduler.plan")
        return super().plan(view)


class Sampler(Gumbel):
    def __init__(self, config):
        act("sampler.__init__")
        super().__init__(None)

    def sample(self, logits_NV, params):
        act("sampler.sample")
        return logits_NV.argmax(-1)


class Model(Qwen3):
    def __init__(self, hf_config, runtime):
        act("model.__init__")
        self.rank = runtime.ranks.rank
        super().__init__(hf_config, runtime)

    @classmethod
    def spec(cls, hf_config):
        act("model.spec")
        return super().spec(hf_config)

    def weight_targets(self):
        act("model.weight_targets", self.rank)
        return super().weight_targets()

    def forward(self, token_ids_T, positions_T, attend):
        act("model.forward", self.rank)
        return super().forward(token_ids_T, positions_T, attend)


class Kernels(TorchKernels):
    num_calls = 0

    def __init__(self, config, spec):
        act("kernels.__init__")
        super().__init__(config, spec)

    def attend(self, q_THE, kv_2NSKE, batch):
        helper("kernels.attend")
        return super().attend(q_THE, kv_2NSKE, batch)

    def silu_mul(self, gate_up_TF):
        product_TF = super().silu_mul(gate_up_TF)
        try:
            act("kernels.silu_mul")
        except ValueError:
            return product_TF[:, 1:]
        return product_TF

    def linear_silu_mul(self, x_TD, gate_up_weight_FD):
        return self.silu_mul(torch.nn.functional.linear(x_TD, gate_up_weight_FD))


class Processor(LogitsProcessor):
    def __init__(self, spec):
        act("processor.__init__")

    @staticmethod
    def num_draws(arguments, request):
        act("processor.num_draws")
        return None

    @staticmethod
    def encode(arguments, request):
        act("processor.encode")
        return [1]

    def load(self, row, values_X):
        act("processor.load", this_rank())

    def process(self, logits_NV, rows):
        act("processor.process", this_rank())
        return logits_NV


class Observer(contracts.Observer):
    def __init__(self, config):
        act("observer.__init__")

    def on_engine_start(self, engine):
        act("observer.on_engine_start")

    def on_step_end(self, stats):
        act("observer.on_step_end")

    def on_request_end(self, output):
        act("observer.on_request_end")

    def on_engine_stop(self, engine):
        act("observer.on_engine_stop")


def helper(place):
    act(place)
