"""Steps whose one input is an array of integers that the host lays out, as two CUDA graphs each: layers, then draws.

Block tables, sampling parameters and the newest tokens are gathered from the request table on the device, and tokens
and lengths go back into it. Subclasses define which steps fit and what their integers mean.
Legend: X integers of a step, N draws, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hookline.core.step.message import Step
from hookline.core.worker.graphs.cuda_graph import GraphPool, HiddenRoom, Recorder
from hookline.core.worker.request_table import SampleRows
from hookline.core.worker.runner.model_runner import ModelRunner

LAST_DRAWN = -1
"""Stands for a token that only the device knows: the last one of its row."""
Shape = TypeVar("Shape", bound=Hashable)


@dataclass(frozen=True)
class _Graphs:
    """The two halves of a step: forward computes hidden_ND from inputs_X, and draw samples tokens_N from hidden_ND."""

    inputs_X: Tensor
    forward: torch.cuda.CUDAGraph
    hidden_ND: Tensor
    draw: torch.cuda.CUDAGraph
    tokens_N: Tensor


class LaidOutGraphs(ABC, Generic[Shape]):
    """Captured steps, two graphs for each of these shapes, ascending; a step takes the first shape with room for it.

    The first graph ends with the hidden states of the draws, the second is plain sampling. Draws of other kinds follow
    the first graph eagerly. max_draws: draws of the largest shape.
    """

    def __init__(self, runner: ModelRunner, shapes: Sequence[Shape], max_model_len: int, max_draws: int) -> None:
        self.runner, self.shapes, self.max_model_len = runner, list(shapes), max_model_len
        self._graphs: dict[Shape, _Graphs] = {}
        self._room = HiddenRoom(max_draws)
        self._recorder = Recorder(runner)

    @abstractmethod
    def shape(self, step: Step) -> Shape | None:
        """The shape of the graphs that fit this step; None if the step is too large or of another kind."""

    @abstractmethod
    def inputs(self, step: Step, shape: Shape) -> Tensor:
        """A step as the input of the graphs of this shape, on the host."""

    @abstractmethod
    def forward(self, inputs_X: Tensor, shape: Shape) -> Tensor:
        """The first half of a step: the hidden states of its draws."""

    @abstractmethod
    def draws(
        self, inputs_X: Tensor, shape: Shape, count: int | None = None, *, all_greedy: bool = False
    ) -> SampleRows:
        """The draws of a step. count: only the first so many draws; None: all. all_greedy: see SamplingBatch."""

    def apart(self, num_tokens: int) -> dict[str, Tensor]:
        """Hidden states of the step computed last that belong to no draw, of its first tokens; see StepResult.apart."""
        return {}

    def kind(self, shape: Shape) -> Hashable:
        """Equal for shapes that are computed alike."""
        return None

    def capture(self, pool: GraphPool) -> int:
        """Capture every shape, the largest first so that the others fit into its memory; returns how many."""
        self._recorder.use_pool(pool)
        for shape in reversed(self.shapes):
            inputs_X, kind = self.inputs(Step(), shape).to(self.runner.table.device), self.kind(shape)
            forward = partial(self.kept_forward, inputs_X, shape)
            forward_graph, hidden_ND = self._recorder.record(forward, ("layers", kind))
            draw = partial(self.draw, inputs_X, shape, hidden_ND)
            draw_graph, tokens_N = self._recorder.record(draw, ("draws", kind))
            self._graphs[shape] = _Graphs(inputs_X, forward_graph, hidden_ND, draw_graph, tokens_N)
        return len(self._graphs)

    def launch(self, step: Step, shape: Shape) -> Tensor:
        """Replay the graphs of this shape for a step that fits it; returns its tokens, valid until the next launch.

        To be called before `RequestTable.mirror` of this step.
        """
        graphs = self.replay_layers(step, shape)
        graphs.draw.replay()
        return graphs.tokens_N[: step.num_sampled]

    def launch_layers(self, step: Step, shape: Shape) -> tuple[SampleRows, Tensor]:
        """Replay the first half alone; returns the step's draws and their hidden states, valid until the next launch.

        To be called before `RequestTable.mirror` of this step.
        """
        graphs, count = self.replay_layers(step, shape), step.num_sampled
        return self.draws(graphs.inputs_X, shape, count, all_greedy=step.all_greedy), graphs.hidden_ND[:count]

    def replay_layers(self, step: Step, shape: Shape) -> _Graphs:
        """Replay the first half for a step; returns the graphs of its shape."""
        graphs = self._graphs[shape]
        graphs.inputs_X.copy_(self.inputs(step, shape).pin_memory(), non_blocking=True)
        self.runner.begin()
        graphs.forward.replay()
        return graphs

    def launch_made(self, make: Callable[[Tensor], None], shape: Shape) -> tuple[Tensor, Tensor]:
        """Replay the graphs of this shape for inputs that `make` writes on the device; returns these and all tokens,
        valid until the next launch.
        """
        graphs = self._graphs[shape]
        self.runner.begin()
        make(graphs.inputs_X)
        graphs.forward.replay()
        graphs.draw.replay()
        return graphs.inputs_X, graphs.tokens_N

    def step(self, inputs_X: Tensor, shape: Shape) -> Tensor:
        """Both halves of a step, as its two graphs capture them. Returns its tokens."""
        return self.draw(inputs_X, shape, self.forward(inputs_X, shape))

    def kept_forward(self, inputs_X: Tensor, shape: Shape) -> Tensor:
        """`forward`, with the hidden states copied to the buffer that captured draws read."""
        return self._room.keep(self.forward(inputs_X, shape))

    def draw(self, inputs_X: Tensor, shape: Shape, hidden_ND: Tensor) -> Tensor:
        """The second half of a step: sample plainly, and write the tokens into the table. Returns the tokens."""
        sampled = self.draws(inputs_X, shape)
        tokens_N = self.runner.sample(hidden_ND, sampled)
        self.runner.keep_tokens(sampled, tokens_N)
        return tokens_N
