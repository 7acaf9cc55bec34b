"""A rank's half of the step extensions: their per-row arguments on the device, and where they take part in a step.

Steps name extensions by index; `core.requests.step_extensions` decides on the host which ones a step runs. Nothing is
allocated before a request uses an extension.
Legend: R rows of the request table, T tokens of a step, N draws, V vocabulary, L tokens of a request, D hidden, W
numbers of a draw for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import ExtensionSpec, LayerRows, LogitsRows, SamplingBatch, TokenTexts
from hookline.core.errors import RequestError, RequestFault, StepFault
from hookline.core.plugin.blame import breach, failure
from hookline.core.plugin.step_extensions import HostExtension
from hookline.core.step.executor import tapped_after
from hookline.core.step.message import Step
from hookline.core.util.raising import Raising
from hookline.core.worker.device_clock import CallClock
from hookline.core.worker.form_checks import form_fault
from hookline.core.worker.request_table import SampleRows, on_device

DURING = " during a step"
"""Follows the method's name in errors of extensions, whose methods are also called before steps."""


class RankExtension:
    """An extension on a rank: its object and its columns, floats_FR float32 and ints_IR int64.

    layers, reads: the layers that it changes, and those whose stream it reads. width: W.
    """

    def __init__(self, stage: HostExtension, index: int, spec: ExtensionSpec) -> None:
        self.stage, self.index = stage, index
        self.extension: Any = stage.cls(spec)
        self.float_names = [name for name, kind in stage.columns.items() if kind is float]
        self.int_names = [name for name, kind in stage.columns.items() if kind is int]
        self.defaults_C = on_device(np.array(stage.column_values(stage.defaults), dtype=np.int64), spec.device)
        columns_CR = self.defaults_C.unsqueeze(1).repeat(1, spec.num_rows)
        self.floats_FR = _floats(columns_CR[: len(self.float_names)])
        self.ints_IR = columns_CR[len(self.float_names) :].contiguous()
        self.layers = self._layers("layers", spec) if stage.changes_stream else ()
        self.reads = self._layers("reads_layers", spec)
        self.changes_logits = stage.changes_logits
        self.width, self.dtype = self.extension.result_width, self.extension.result_dtype
        if stage.has_results and (type(self.width) is not int or self.width < 1 or self.dtype not in _DTYPES):
            told = (
                f"its result_width is {self.width!r} and its result_dtype {self.dtype!r}, not at least 1 and int64 or "
            )
            raise RequestFault(breach(stage.entry, "__init__", f"{told}float32"), extensions=1 << index)

    def _layers(self, name: str, spec: ExtensionSpec) -> tuple[int, ...]:
        layers = getattr(self.extension, name)
        if not all(type(layer) is int and 0 <= layer < spec.num_layers for layer in layers):
            what = f"its {name} are {tuple(layers)}, and the model's layers are 0 to {spec.num_layers - 1}"
            raise RequestFault(breach(self.stage.entry, "__init__", what), extensions=1 << self.index)
        return tuple(sorted(set(layers)))

    def use(self, extension: Any) -> None:
        """Replace the extension's object with a wrapper that calls it."""
        self.extension = extension

    def load(self, row: int, values_X: Tensor) -> None:
        """Store the arguments of the request that owns the row from now on; without values, the defaults."""
        num_floats, num_columns = len(self.float_names), len(self.defaults_C)
        if num_columns:
            given_C = values_X[:num_columns] if len(values_X) else self.defaults_C
            self.floats_FR[:, row] = _floats(given_C[:num_floats])
            self.ints_IR[:, row] = given_C[num_floats:]
        self.extension.load(row, values_X[num_columns:])

    def columns(self, rows_N: Tensor) -> dict[str, Tensor]:
        """The columns of some rows, by the names of their fields."""
        found: dict[str, Tensor] = {}
        for names, table_CR in ((self.float_names, self.floats_FR), (self.int_names, self.ints_IR)):
            if names:
                found.update(zip(names, table_CR.index_select(1, rows_N).unbind(0), strict=True))
        return found


class RankExtensions:
    """The extensions of a rank in the order they run, and the tokens of the rows that some of them read."""

    def __init__(
        self,
        stages: Sequence[HostExtension],
        spec: ExtensionSpec,
        load_tokenizer: Callable[[], TokenTexts | None] = lambda: None,
        own_layers: range | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        self.stages, self.spec, self._load_tokenizer = stages, spec, load_tokenizer
        self.own_layers = range(spec.num_layers) if own_layers is None else own_layers
        """The layers of this rank's stage."""
        self.taps = [layer for layer in sorted(taps) if layer in self.own_layers]
        """The layers of this stage that engine.taps or the drafter asks for: every step keeps their stream."""
        self.apart = [tapped_after(layer) for layer in self.taps]
        """The names of the streams that a watch keeps in every step; see StepResult.apart."""
        self._made: dict[int, RankExtension] = {}
        self.generation = 0
        """Changes when an extension is made anew: graphs that captured the old one must not be replayed."""
        self.clock = CallClock(spec.device) if spec.device.type == "cpu" else None
        """Times the extensions' methods; on a GPU None until `time_calls` is called."""

    @cached_property
    def _tokenizer(self) -> TokenTexts | None:
        return self._load_tokenizer()

    @cached_property
    def tokens_RL(self) -> Tensor:
        """int32 tokens of each row, prompt first; allocated when a request first needs it."""
        shape = (self.spec.num_rows, self.spec.max_model_len + 1)
        return torch.zeros(shape, dtype=torch.int32, device=self.spec.device)

    @cached_property
    def num_prompt_tokens_R(self) -> Tensor:
        """int64 prompt lengths of the rows of tokens_RL."""
        return torch.zeros(self.spec.num_rows, dtype=torch.int64, device=self.spec.device)

    def extension(self, index: int, rows: Sequence[int] = ()) -> RankExtension:
        """The extension of this index, made on first use; that never happens inside a graph's capture.

        rows: the rows of the requests that end if it cannot be made; if empty, all requests that use it end.
        Raises: RequestFault if it cannot be made.
        """
        if index not in self._made:
            with self.raising(index, "__init__", rows):
                stage = self.stages[index]
                spec = replace(self.spec, config=stage.config, tokenizer=self._tokenizer if stage.reads_texts else None)
                self._made[index] = RankExtension(stage, index, spec)
        return self._made[index]

    def raising(self, index: int, method: str, rows: Sequence[int] = ()) -> Raising:
        """Around an extension's method: its errors end the requests in these rows, or all requests that use it."""
        entry, extensions = self.stages[index].entry, 0 if rows else 1 << index

        def fault(error: BaseException) -> RequestFault:
            is_refusal = isinstance(error, RequestError)
            told = f"{entry} refuses: {error}" if is_refusal else failure(entry, method, error, DURING)
            if isinstance(error, RequestFault):
                told = str(error)
            return RequestFault(told, rows=rows, extensions=extensions, is_refusal=is_refusal)

        return Raising(fault)

    def calling(self, index: int, method: str, rows: Sequence[int] = ()) -> Raising:
        """`raising`, which also times the method."""
        raising = self.raising(index, method, rows)
        return raising if self.clock is None else _Timed(raising, self.clock, index)

    def time_calls(self) -> None:
        """Time the extensions' methods from now on."""
        if self.clock is None:
            self.clock = CallClock(self.spec.device)

    def running(self, extensions: int) -> list[RankExtension]:
        """The extensions whose bits are set, in the order they run."""
        return [self.extension(index) for index in range(len(self.stages)) if extensions >> index & 1]

    def reads_tokens(self, extensions: int) -> bool:
        """Whether any of the extensions whose bits are set reads its rows' tokens."""
        return any(one.stage.reads_tokens for one in self.running(extensions))

    def is_graph_safe(self, extensions: int) -> bool:
        """Whether all extensions whose bits are set may be captured in a CUDA graph."""
        return all(one.stage.entry.needs.graph_safe for one in self.running(extensions))

    def treats_sizes_alike(self, extensions: int) -> bool:
        """Whether the extensions whose bits are set compute the same for all numbers of rows."""
        return all(one.stage.entry.needs.sizes_alike for one in self.running(extensions))

    def layer_bits(self, extensions: int) -> int:
        """The bits of the extensions among these that change or read the stream after some layer."""
        return sum(1 << one.index for one in self.running(extensions) if one.layers or one.reads)

    def read_layers(self, extensions: int) -> list[int]:
        """The layers whose stream the extensions whose bits are set read, in ascending order."""
        return sorted({layer for one in self.running(extensions) for layer in one.reads})

    def width(self, extensions: int) -> int:
        """How many numbers a draw sends to the host for these extensions, all together."""
        return sum(one.width for one in self.running(extensions) if one.stage.has_results)

    def receive(self, step: Step, views: Any) -> None:
        """Store the arguments and known tokens that a step brings. views: the step's sections on the device."""
        starts = np.concatenate([[0], np.cumsum(step.extension_lens)])
        for place, (row, index) in enumerate(zip(step.extension_rows, step.extension_ids, strict=True)):
            self._load(int(row), int(index), views["extension_values"][starts[place] : starts[place + 1]])
        if len(step.known_rows):
            self.num_prompt_tokens_R[views["known_rows"]] = views["known_prompt_lens"]
            pieces = views["known_tokens"].to(torch.int32).split(step.known_lens.tolist())
            for row, piece in zip(step.known_rows.tolist(), pieces, strict=True):
                self.tokens_RL[row, : len(piece)] = piece
        if step.draws_several and self.reads_tokens(step.extensions):
            # A draw reads the drafts before it. Drafts that turn out wrong are overwritten before they are read again.
            places_T = np.concatenate(
                [
                    np.arange(start, start + length)
                    for start, length in zip(step.chunk_starts, step.chunk_lens, strict=True)
                ]
            )
            rows_T = on_device(step.chunk_rows.repeat(step.chunk_lens), self.spec.device)
            self.tokens_RL[rows_T, on_device(places_T, self.spec.device)] = views["token_ids_T"].to(torch.int32)

    def _load(self, row: int, index: int, values_X: Tensor) -> None:
        if not len(values_X) and index not in self._made:
            return  # an extension that was never made holds no arguments to forget
        extension = self.extension(index, [row])
        try:
            with self.calling(index, "load", [row] * bool(len(values_X))):
                extension.load(row, values_X)
        except BaseException:
            if not len(values_X):  # it keeps arguments of the row's last owner, so it is made anew; all its users end
                del self._made[index]
                self.generation += 1
            raise

    def watch(self, extensions: int, rows_T: Tensor, positions_T: Tensor, draws_N: Tensor | None) -> LayerWatch | None:
        """The watch of the model's layers in a step that runs these extensions; None if no extension or tap needs it.

        rows_T: the row of the request table of each token. draws_N: which of the tokens draws follow; None for all.
        """
        seeing = [one for one in self.running(extensions) if one.layers or one.reads]
        return LayerWatch(self, seeing, rows_T, positions_T, draws_N) if seeing or self.taps else None

    def process(
        self,
        logits_NV: Tensor,
        extensions: int,
        sampled: SampleRows,
        max_num_tokens: int,
        *,
        is_checking: bool = False,
    ) -> Tensor:
        """Logits (N, V) float32 as the extensions leave them; may overwrite its input.

        is_checking: whether to look for NaN in their results, which waits for the device.

        Raises: RequestFault naming the extension that failed.
        """
        for one in self.running(extensions):
            if not one.changes_logits:
                continue
            method = one.stage.draw_method
            rows = self._logits_rows(one, sampled, max_num_tokens)
            form, was_nan = logits_NV.shape, is_checking and bool(logits_NV.isnan().any())
            with self.calling(one.index, method):
                logits_NV = getattr(one.extension, method)(logits_NV, rows)
            fault = form_fault(logits_NV, form, [torch.float32])
            if is_checking and not fault and not was_nan and bool(logits_NV.isnan().any()):
                fault = "it made a logit NaN"
            if fault:
                what = breach(one.stage.entry, method, fault, DURING)
                raise RequestFault(what, extensions=1 << one.index)
        return logits_NV

    def results(self, tokens_N: Tensor, extensions: int, sampled: SampleRows, max_num_tokens: int) -> list[Tensor]:
        """The extensions' results for these draws, for the host: (N, W) int64 each, float32 as its bits.

        Raises: RequestFault naming the extension that failed.
        """
        found = []
        for one in self.running(extensions):
            if one.stage.has_results:
                rows = self._logits_rows(one, sampled, max_num_tokens)
                with self.calling(one.index, "after_draw"):
                    result_NW = one.extension.after_draw(tokens_N, rows)
                shape, dtype = (len(tokens_N), one.width), _DTYPES[one.dtype]
                if fault := form_fault(result_NW, shape, [dtype]):
                    raise RequestFault(breach(one.stage.entry, "after_draw", fault, DURING), extensions=1 << one.index)
                found.append(result_NW if dtype is torch.int64 else result_NW.contiguous().view(torch.int32).long())
        return found

    def split(self, numbers_NX: np.ndarray[Any, Any], extensions: int) -> dict[str, np.ndarray[Any, Any]]:
        """The columns of all `results`, on the host, as an array (N, W) by the extension's name, in its dtype."""
        found, start = {}, 0
        for one in self.running(extensions):
            if one.stage.has_results:
                part_NW = numbers_NX[:, start : start + one.width]
                start += one.width
                is_float = one.dtype == "float32"
                found[one.stage.entry.name] = part_NW.astype(np.int32).view(np.float32) if is_float else part_NW.copy()
        return found

    def _logits_rows(self, one: RankExtension, sampled: SampleRows, max_num_tokens: int) -> LogitsRows:
        reads, rows_N = one.stage.reads_tokens, sampled.rows_N
        return LogitsRows(
            rows_N=rows_N,
            columns=one.columns(rows_N),
            sampling=sampled.params,
            tokens_RL=self.tokens_RL if reads else None,
            num_prompt_tokens_N=self.num_prompt_tokens_R.index_select(0, rows_N) if reads else None,
            max_num_tokens=max_num_tokens,
            streams={layer: sampled.streams[layer] for layer in one.reads},
        )

    def write_back(self, extensions: int, rows_N: Tensor, params: SamplingBatch, tokens_N: Tensor) -> None:
        """Store the sampled tokens where extensions of the next draw read them. Device: no host sync; graph-safe."""
        if self.reads_tokens(extensions):
            kept_N = torch.empty_like(tokens_N, dtype=torch.int32)  # any token will do in place of NO_TOKEN
            self.tokens_RL[rows_N, params.position_N] = torch.remainder(tokens_N, self.spec.vocab_size, out=kept_N)


class _Timed(Raising):
    """Around a method of an extension: `raising`, and its time."""

    def __init__(self, raising: Raising, clock: CallClock, index: int) -> None:
        self._raising, self._clock, self._index = raising, clock, index
        self._begun: Any = None

    def __enter__(self) -> None:
        self._begun = self._clock.begin()

    def __exit__(self, *raised: Any) -> None:
        self._clock.end(self._index, self._begun)
        self._raising.__exit__(*raised)


class LayerWatch:
    """`core.layers.stage.Tap` of one step: after each layer, the extensions that change the stream, and that read it.

    streams: the stream (N, D) of the draws' tokens after each layer that an extension reads. apart: see StepResult; the
    stream (T, D) float32 of all tokens after each layer of engine.taps.
    """

    def __init__(
        self,
        extensions: RankExtensions,
        seeing: Sequence[RankExtension],
        rows_T: Tensor,
        positions_T: Tensor,
        draws_N: Tensor | None,
    ) -> None:
        self._extensions, self._draws_N, own_layers = extensions, draws_N, extensions.own_layers
        self._changing = [(one, LayerRows(rows_T, positions_T, one.columns(rows_T))) for one in seeing if one.layers]
        self._reads = {layer for one in seeing for layer in one.reads if layer in own_layers}
        self._missing: dict[int, RankExtension | None] = {
            **dict.fromkeys(extensions.taps),
            **{layer: one for one in seeing for layer in (*one.layers, *one.reads) if layer in own_layers},
        }
        """The layers that the model has not shown yet, and an extension that asks for each; None: engine.taps alone."""
        self.streams: dict[int, Tensor] = {}
        self.apart: dict[str, Tensor] = {}

    def __call__(self, layer: int, stream: Callable[[], Tensor]) -> Tensor | None:
        """Let the extensions that asked for this layer see and change the stream; returns it if they did."""
        if layer not in self._missing:
            return None
        del self._missing[layer]
        stream_TD, is_changed = stream(), False
        for one, rows in self._changing:
            if layer in one.layers:
                form, dtype = stream_TD.shape, stream_TD.dtype
                with self._extensions.calling(one.index, "after_layer"):
                    stream_TD = one.extension.after_layer(layer, stream_TD, rows)
                if fault := form_fault(stream_TD, form, [dtype]):
                    what = breach(one.stage.entry, "after_layer", fault, DURING)
                    raise RequestFault(what, extensions=1 << one.index)
                is_changed = True
        if layer in self._reads:
            draws_N = self._draws_N
            self.streams[layer] = stream_TD.clone() if draws_N is None else stream_TD.index_select(0, draws_N)
        if layer in self._extensions.taps:  # a copy, since later layers may write over it
            self.apart[tapped_after(layer)] = stream_TD.to(torch.float32, copy=True)
        return stream_TD if is_changed else None

    def check_shown(self) -> None:
        """Raises: RequestFault for an extension whose layers the model never showed; StepFault for engine.taps."""
        why = "which the model does not show, since its forward does not use hookline.core.layers.tapped"
        for layer, one in self._missing.items():
            if one is None:
                asked = f"engine.taps, or the drafter, asks for layers {[*self._missing]}"
                raise StepFault(f"{asked}, {why}; leave it out")
            what = f"{one.stage.entry} asks for layer {layer}, {why}; use another model"
            raise RequestFault(what, extensions=1 << one.index, is_refusal=True)


_DTYPES = {"int64": torch.int64, "float32": torch.float32}


def _floats(bits: Tensor) -> Tensor:
    """float32 values from their bits in int64."""
    return bits.to(torch.int32).contiguous().view(torch.float32)
