"""The residual stream after transformers' own layers, for observers and step extensions that asked for it.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hookline.core.errors import RequestError
from hookline.core.layers import tapped_stream

NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm")
"""Names of the last norm in transformers' decoders."""


@contextmanager
def shown_layers(decoder: nn.Module, num_layers: int, attend: Any) -> Iterator[None]:
    """Around one forward of a decoder: pass each layer's result to the readers of the stream, if there are any.

    The layers are the decoder's first list of num_layers modules; without such a list no layer is read, nor is a layer
    whose result is no stream (1, T, D), or no tuple that begins with one.
    """
    if getattr(attend, "tap", None) is None:
        yield
        return
    lists = [one for one in decoder.modules() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
    with ExitStack() as hooks:
        for index, layer in enumerate(lists[0] if lists else ()):
            hook = layer.register_forward_hook(partial(_show, index, attend))
            hooks.callback(hook.remove)
        yield


def last_norm(decoder: nn.Module) -> nn.Module:
    """The norm behind a decoder's layers.

    Raises: RequestError for a decoder that has none under a name that is known here.
    """
    for name in NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise RequestError(
        f"transformers' {type(decoder).__name__} has no norm behind its layers under a name that is known here "
        f"({', '.join(NORMS)}), by which logits of inner layers are computed; use another model"
    )


def _show(index: int, attend: Any, layer: nn.Module, given: Any, output: Any) -> Any:
    stream_1TD = output[0] if isinstance(output, tuple) else output
    if not isinstance(stream_1TD, Tensor) or stream_1TD.ndim != 3 or len(stream_1TD) != 1:
        return None
    changed_TD = tapped_stream(index, stream_1TD[0], attend)
    if changed_TD is None:
        return None
    changed_1TD = changed_TD.unsqueeze(0)
    return (changed_1TD, *output[1:]) if isinstance(output, tuple) else changed_1TD
