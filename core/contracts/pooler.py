"""The contract of poolers: hidden states of prompts in, one vector for each prompt out.

Legend: B requests of a call, T their tokens, D hidden, S numbers kept for a request between chunks, F numbers of a
vector, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, device


class PoolerModel(Protocol):
    """The model as a pooler sees it."""

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of the checkpoint, in float32 on the device: for a head that the model itself does not have.

        Raises: CheckpointError if the checkpoint lacks the tensor, or has it in another shape.
        """
        ...

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits over the whole vocabulary: (B, D) -> (B, V), by the model's own head; every rank gets all of them."""
        ...

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a piece of text, without the special tokens that begin or end a prompt.

        Raises: RequestError if there is no tokenizer.
        """
        ...


@dataclass(frozen=True)
class PoolerSpec:
    """The sizes and the model that a pooler is built for.

    hidden_size: D. vocab_size: V. device: of all tensors it is given. hf_config: the checkpoint's config.json. model:
    for poolers that need the model's head or a weight of the checkpoint.
    """

    hidden_size: int
    vocab_size: int
    device: device
    hf_config: Mapping[str, Any]
    model: PoolerModel


@dataclass(frozen=True)
class PooledChunks:
    """Which hidden states a call of `accumulate` brings: B pieces of B prompts, one after the other. On the device.

    starts_B, lens_B: where each piece lies in hidden_TD, and its tokens, at least one; chunk_of_T: the piece a token
    belongs to; positions_T: its position in its prompt, from 0. All int64.
    """

    starts_B: Tensor
    lens_B: Tensor
    chunk_of_T: Tensor
    positions_T: Tensor


class Pooler(Protocol):
    """Makes one vector of a prompt's hidden states, which arrive in pieces. For classes to extend.

    Constructed as `Pooler(config, spec)` on each rank, when a request first asks for it. All numbers it keeps of a
    request are in that request's row of the state, so that chunks, preemptions and other requests make no difference;
    the row is zero before a prompt's first piece. Hidden states are taken after the model's final norm and are the same
    on every rank.
    """

    reads_all_tokens: bool = True
    """Whether it needs the hidden states of every token; its requests then compute their whole prompt. If not, it gets
    each prompt's last token alone, in one call, and its requests start from cached prefixes."""
    task: str = "embed"
    """The kind of its vectors: "embed", of hidden_size numbers, which a request may have shortened and normalised;
    "classify", the logits of classes; "score", one number."""

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        """Keep the config; load weights of the checkpoint, if the pooler needs any."""
        ...

    def state_size(self) -> int:
        """S: numbers to keep for each request between its pieces."""
        ...

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """The state of B requests after these further pieces of their prompts.

        Shapes: state_BS (B, S) float32, which may be overwritten; hidden_TD (T, D) in the model's dtype; returns
        (B, S) float32. A row depends on its own request alone.
        Device: no host sync.
        """
        ...

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """The vectors of B requests whose prompts are complete.

        Shapes: state_BS (B, S) float32, num_tokens_B (B,) int64, the prompts' lengths; returns (B, F) float32.
        Device: no host sync.
        """
        ...
