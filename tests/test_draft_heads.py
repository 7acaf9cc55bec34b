"""Drafters with a head: it computes what plain torch does, and no answer changes. Legend: see draft_heads.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline import LLM, SamplingParams
from hookline.core.assembly.resolve import resolve
from hookline.core.assembly.speculation import TargetModel
from hookline.core.config.settings import validate
from hookline.core.contracts import ComputedRow, DraftCounts, DrafterSpec, DraftRow, Needs
from hookline.core.errors import CheckpointError, ConfigError, PluginError
from hookline.core.outputs import RequestOutput
from hookline.core.plugin import sources
from hookline.core.plugin.host import PluginHost
from hookline.plugins.drafters import Eagle3Config, MtpConfig
from hookline.plugins.drafters.eagle3 import Eagle3, read_config
from hookline.plugins.drafters.heads import HeadDrafter
from hookline.plugins.drafters.mtp import Mtp
from tests.draft_heads import (
    eagle_config,
    eagle_entries,
    eagle_weights,
    repeat_layer,
    rms,
    save_nextn,
    save_repeating,
    save_weights,
    target_of,
)
from tests.quantised_layouts import LAYOUTS, write_layout
from tests.small_models import CONFIGS, save_checkpoint

NEXTN = {**CONFIGS["deepseek_v3"], "num_hidden_layers": 2, "mlp_bias": False}
GLM = {**CONFIGS["glm4_moe_lite"], "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}


def drafter_of(cls: Any, config: Any, model: str, folder: Path, drafter: Any) -> HeadDrafter:
    target = target_of(model, folder, drafter)
    return cls(config, DrafterSpec(target.spec.vocab_size, 4, 128, target=target))  # type: ignore[no-any-return]


def observed_in_parts(drafter: HeadDrafter, tokens: list[int], streams: Mapping[int, np.ndarray[Any, Any]]) -> None:
    """Show a request's hidden states in chunks of several sizes, one of them twice, beside another request."""
    known = np.array(tokens, dtype=np.int32)
    other = ComputedRow(7, known[:9], 0, {layer: one[:8] for layer, one in streams.items()})
    for start, end in ((0, 5), (5, 6), (3, 6), (6, len(tokens) - 1)):
        row = ComputedRow(3, known, start, {layer: one[start:end] for layer, one in streams.items()})
        drafter.observe([other, row] if start == 5 else [row])


TOKENS = [5, 17, 40, 3, 22, 9, 9, 61, 80, 12, 35, 2, 71, 70, 8]


def check_drafts(
    drafter: HeadDrafter,
    streams: Mapping[int, np.ndarray[Any, Any]],
    combined_TH: Tensor,
    entries: Callable[[Tensor, Tensor], Tensor],
    best: Callable[[Tensor], int],
) -> None:
    """Hold a drafter against plain torch: the hidden state of its last entry, and three drafts, each of the one before.

    combined_TH: what entries are made of; entries: all of them at once; best: the token of an entry's hidden state.
    """
    observed_in_parts(drafter, TOKENS, streams)
    expected: list[int] = []
    with torch.no_grad():
        first_TH = entries(torch.tensor(TOKENS[1:]), combined_TH)
        out_TH, own_TH = first_TH, combined_TH
        for _ in range(3):
            expected.append(best(out_TH[-1]))
            own_TH = torch.cat([own_TH, out_TH[-1:]])
            out_TH = entries(torch.tensor([*TOKENS[1:], *expected]), own_TH)
    row = DraftRow(3, np.array(TOKENS, dtype=np.int32), 4, 3, SamplingParams(temperature=0.0))
    assert drafter.propose(row) == expected == drafter.propose(row)
    torch.testing.assert_close(drafter.hidden_of(3), first_TH[-1], rtol=1e-3, atol=1e-4)
    assert not drafter.propose(DraftRow(4, row.tokens, 4, 3)), "it saw nothing of this request"
    drafter.forget(3)
    assert not drafter.propose(row)


@pytest.mark.parametrize("config", [NEXTN, GLM], ids=["deepseek_v3", "glm4_moe_lite"])
def test_the_layer_behind_the_last_one_drafts_what_plain_torch_computes(config: dict[str, Any], tmp_path: Path) -> None:
    weights, entries = save_nextn(config, tmp_path)
    stream_TD = torch.randn(len(TOKENS) - 1, config["hidden_size"])
    combined_TD = rms(stream_TD, weights["model.norm.weight"], config.get("rms_norm_eps", 1e-6))
    drafter = drafter_of(Mtp, MtpConfig(k=3), "deepseek", tmp_path, "mtp")
    check_drafts(
        drafter,
        {1: stream_TD.numpy()},
        combined_TD,
        entries,
        lambda x_D: int((weights["lm_head.weight"] @ x_D).argmax()),
    )


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_quantised_layer_drafts_what_the_dequantised_one_drafts(quantization: str, tmp_path: Path) -> None:
    """Of a checkpoint in blocks of FP8, whose absorbed matrix is made plain; and of one that is rounded when it is
    loaded, which is another rounding, so that it is near alone."""
    save_nextn(NEXTN, tmp_path / "plain")
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path / "layout", LAYOUTS["fp8_blocks"])
    folders = (quantised, dequantised) if quantization == "auto" else (tmp_path / "plain", tmp_path / "plain")
    streams = {1: torch.randn(len(TOKENS) - 1, NEXTN["hidden_size"]).numpy()}
    found = []
    for folder, keys in zip(folders, ({"quantization": quantization}, {}), strict=True):
        target = target_of("deepseek", folder, "mtp", **keys)
        drafter = Mtp(MtpConfig(), DrafterSpec(target.spec.vocab_size, 4, 128, target=target))
        observed_in_parts(drafter, TOKENS, streams)
        found.append(drafter.hidden_of(3))
    is_rounded = quantization == "fp8"
    distance = float((found[0] - found[1]).norm() / found[1].norm())
    assert (0.001 < distance < 0.3) if is_rounded else distance < 1e-4


LLAMA = {**CONFIGS["llama"], "num_hidden_layers": 3}


@pytest.mark.parametrize(
    "changed",
    [
        {"num_key_value_heads": 2, "draft_vocab_size": 40},
        {"num_key_value_heads": 4, "hidden_size": 24, "target_hidden_size": 32, "norm_before_residual": True},
    ],
    ids=["the model's embedding, tokens of its own", "its own embedding and size"],
)
def test_an_eagle_head_drafts_what_plain_torch_computes(changed: dict[str, Any], tmp_path: Path) -> None:
    model = save_checkpoint(LLAMA, tmp_path / "model")
    config = eagle_config(LLAMA, **changed)
    weights = eagle_weights(config, LLAMA["hidden_size"])
    embedding_VH = model.model.embed_tokens.weight.detach()
    if "target_hidden_size" in changed:
        embedding_VH = weights["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"])
    save_weights(config, weights, tmp_path / "head")
    streams = {layer: torch.randn(len(TOKENS) - 1, LLAMA["hidden_size"]) for layer in (2, 0, 1)}
    combined_TH = torch.cat([streams[layer] for layer in (0, 1, 2)], -1) @ weights["fc.weight"].T

    def best(stream_H: Tensor) -> int:
        place = int((weights["lm_head.weight"] @ rms(stream_H, weights["norm.weight"], 1e-5)).argmax())
        return place + int(weights["d2t"][place])

    own = {"checkpoint": str(tmp_path / "head")}
    drafter = drafter_of(Eagle3, Eagle3Config(k=3, **own), "llama", tmp_path / "model", {"name": "eagle3", **own})
    entries = partial(eagle_entries, config, weights, embedding_VH)
    check_drafts(drafter, {layer: one.numpy() for layer, one in streams.items()}, combined_TH, entries, best)


class Replaying(TargetModel):
    """A model on the CPU whose graphs run what they would have recorded, on the inputs of the moment."""

    captures = True

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        written = step()

        def _replay() -> None:
            written.copy_(step())

        return _replay, written


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_heads_in_graphs_of_other_sizes_propose_what_eager_ones_do(name: str) -> None:
    shape = {**{"eagle3": LLAMA, "mtp": NEXTN}[name], "max_position_embeddings": 400}
    model, layers = random_model({"eagle3": "llama", "mtp": "deepseek"}[name], shape), {"layers": [0, 1]}
    host = PluginHost.load()
    engine = {"max_num_seqs": 6, "max_model_len": 400, "max_num_batched_tokens": 512}
    tree = {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "drafter": {"name": name, **(layers if name == "eagle3" else {})},
    }
    config = validate({**tree, "engine": engine}, host)
    resolved = resolve(config, host)
    drafters = [
        {"eagle3": Eagle3, "mtp": Mtp}[name](config.drafter.config, DrafterSpec(96, 6, 400, target=target))
        for target in (TargetModel(resolved), Replaying(resolved))
    ]
    rng, found = np.random.default_rng(0), [list[list[int]]() for _ in drafters]
    tokens, starts = [rng.integers(0, 96, length, dtype=np.int32) for length in (2, 9, 300, 40, 17)], [0] * 5
    for turn in range(5):
        shown = [
            {
                layer: rng.standard_normal((len(row) - 1 - start, resolved.spec.hidden_size), np.float32)
                for layer in resolved.drafter_layers
            }
            for row, start in zip(tokens, starts, strict=True)
        ]
        rows = [ComputedRow(id_, *one) for id_, one in enumerate(zip(tokens, starts, shown, strict=True))]
        params = [SamplingParams(temperature=id_ % 3 / 2, top_k=5 * (id_ == 2), min_p=0.1) for id_ in range(5)]
        asked = [DraftRow(id_, row, 1, 3, params[id_], seed=id_) for id_, row in enumerate(tokens)]
        for drafter, proposals in zip(drafters, found, strict=True):
            for part in (rows[:3], rows[3:]) if turn == 2 else (rows,):
                drafter.observe(part)
            if turn == 3:  # its entries wait to be computed, and another request gets its row
                drafter.forget(4)
                drafter.observe([ComputedRow(7, tokens[0], 0, shown[0])])
            proposals += [*drafter.propose_all(asked), *drafter.propose_all(asked[::2]), drafter.propose(asked[3])]
        starts = [len(row) - 1 for row in tokens]
        tokens = [np.concatenate([row, rng.integers(0, 96, 1 + id_, dtype=np.int32)]) for id_, row in enumerate(tokens)]
    assert found[0] == found[1]
    assert [len(drafts) for drafts in found[0][:9]] == [3] * 9
    assert [len(drafts) for drafts in found[0][27:]] == [3, 3, 3, 3, 0, 3, 3, 0, 3, *[3] * 9]


def test_kernels_that_do_not_compute_a_heads_attention_are_refused_by_name() -> None:
    host = PluginHost.load()
    tree = {"model": random_model("llama", LLAMA), "device": "cpu", "dtype": "float32"}
    resolved = resolve(validate(tree, host), host)
    kernels = replace(resolved.kernels, name="narrow", needs=Needs(head_dims=(32,)))
    narrow = TargetModel(replace(resolved, kernels=kernels))
    with pytest.raises(PluginError, match=r"kernels 'narrow' .* does not fit: the model's head_dim is 8, needs 32"):
        narrow.attention(resolved.spec, 4, 3)


RIGHT = {**CONFIGS["deepseek_v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0}
PROMPTS = [[5, 6, 7, 8, 9, 10], [3, 4] * 9, list(range(20, 60)), [11]]
NUM_TOKENS = 30
SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "logprobs": 1}
SCARCE: dict[str, Any] = {"num_blocks": 7, "block_size": 16, "max_num_batched_tokens": 24, "overlap": True}
"""Requests are preempted, and prompts computed in chunks."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0, "logprobs": 3}, {}),
    "sampled": (SAMPLED, {}),
    "truncated": ({**SAMPLED, "temperature": 1.3, "top_k": 20, "top_p": 0.6, "min_p": 0.05}, {}),
    "processors": (
        {**SAMPLED, "repetition_penalty": 1.1, "logit_bias": {7: -5.0}, "min_tokens": 20, "n": 2},
        {},
    ),
    "preemption": (SAMPLED, SCARCE),
    "preemption, greedy": ({"temperature": 0.0, "logprobs": 1}, SCARCE),
}
RANKS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}]


def answers(
    model: str, folder: Path, drafter: Any, cases: list[str], **keys: Any
) -> tuple[list[list[RequestOutput]], list[DraftCounts]]:
    """Of each case's prompts twice, the second time with their prefixes cached, and what drafts came to in all."""
    found, counts, engine = [], [], CASES[cases[0]][1]
    options = {"device": "cpu", "dtype": "float32", "engine": {**SMALL, **engine}, **keys}
    with LLM(model={"name": model, "checkpoint": str(folder)}, drafter=drafter, **options) as llm:
        for case in cases:
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **CASES[case][0])
            found += [llm.generate(PROMPTS, params), llm.generate(PROMPTS, params)]
            counts.append(deepcopy(llm.engine.speculation or DraftCounts()))
    return found, counts


def check_equal(ours: list[list[RequestOutput]], theirs: list[list[RequestOutput]]) -> None:
    """The same tokens, and log-probabilities as equal as sums in another order are."""
    for mine, other in zip(chain(*ours), chain(*theirs), strict=True):
        for one, expected in zip(mine.completions, other.completions, strict=True):
            assert one.token_ids == expected.token_ids and len(one.token_ids) == NUM_TOKENS
            for got, wanted in zip(one.logprobs or (), expected.logprobs or (), strict=True):
                assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path, dict[str, Any]]]:
    """Of each drafter: a model plugin, a checkpoint, and the drafter with a head that is always right of it."""
    made: dict[str, tuple[str, Path, dict[str, Any]]] = {}

    def _made(name: str) -> tuple[str, Path, dict[str, Any]]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name == "mtp":
                save_nextn(RIGHT, folder, repeat_layer)
                made[name] = "deepseek", folder, {"name": name, "k": 3}
            else:
                model, head = save_repeating(LLAMA, folder)
                made[name] = "llama", model, {"name": name, "k": 3, "checkpoint": str(head)}
        return made[name]

    return _made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp", "eagle3"])
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["greedy", "sampled", "truncated", "processors"], id="plain", marks=pytest.mark.slow),
        pytest.param(["preemption", "preemption, greedy"], id="scarce"),
    ],
)
def test_answers_with_a_head_are_those_without_and_its_drafts_are_right(
    name: str, cases: list[str], right: Callable[[str], tuple[str, Path, dict[str, Any]]]
) -> None:
    model, folder, drafter = right(name)
    plain, _ = answers(model, folder, None, cases)
    found, counts = answers(model, folder, drafter, cases)
    check_equal(found, plain)
    before = DraftCounts()
    for case, count in zip(cases, counts, strict=True):
        num_drafted, num_kept = count.num_drafted - before.num_drafted, count.num_kept - before.num_kept
        before = count
        assert num_drafted > 100
        if case != "processors":  # which the head's draws know nothing of
            assert num_kept == num_drafted if "greedy" in case else num_kept > 0.9 * num_drafted
    is_scarce = cases[0] == "preemption"
    assert any(output.num_preemptions for output in chain(*found)) == is_scarce
    assert any(output.num_cached_tokens for output in found[1])


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("keys", RANKS, ids=str)
def test_answers_of_several_ranks_with_a_head_are_those_of_one_without(keys: dict[str, int], tmp_path: Path) -> None:
    save_nextn(NEXTN, tmp_path)
    plain, _ = answers("deepseek", tmp_path, None, ["preemption"])
    found, counts = answers("deepseek", tmp_path, {"name": "mtp", "adaptive": False}, ["preemption"], **keys)
    check_equal(found, plain)
    assert counts[0].num_drafted > 100


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests/watching_drafter.py, which is a plugin then and has seen nothing."""
    from tests import watching_drafter

    monkeypatch.setenv(sources.DEVELOPMENT_VARIABLE, watching_drafter.__name__)
    watching_drafter.SEEN.clear()
    watching_drafter.ANSWERS.clear()
    return watching_drafter


@pytest.mark.parametrize("engine", [{}, SCARCE], ids=["plain", "scarce"])
def test_drafters_see_the_hidden_states_of_every_token_that_counts_and_of_no_other(
    engine: dict[str, Any], tmp_path: Path, watching: Any
) -> None:
    model = save_checkpoint(CONFIGS["llama"], tmp_path)
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8, 0.8, 0.0)
    ]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "engine": {**SMALL, **engine}}
    asked = {"name": "llama", "checkpoint": str(tmp_path)}
    with LLM(model=asked, **options) as llm:
        plain = [output.token_ids for output in llm.generate(PROMPTS, params)]
    whole = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    watching.ANSWERS.extend(whole)
    with LLM(model=asked, drafter="watching", **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        counts = llm.engine.speculation
    assert [output.token_ids for output in outputs] == plain and counts is not None
    assert 20 < counts.num_kept < counts.num_drafted - 20
    assert any(output.num_preemptions for output in outputs) == bool(engine)
    for id_, tokens in enumerate(whole):
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        after = [watching.streams_of(id_, layer) for layer in (0, 1)]
        assert sorted(after[0]) == list(range(len(after[0])))
        assert len(tokens) - 1 - 5 <= len(after[0]) < len(tokens), "those of the step that ends a request are not shown"
        for place, stream_D in after[0].items():
            np.testing.assert_allclose(stream_D, states[1][0, place].numpy(), rtol=1e-3, atol=1e-4)
        normed_D = rms(torch.tensor(after[1][4]), model.model.norm.weight.detach(), 1e-6)
        torch.testing.assert_close(normed_D, states[2][0, 4], rtol=1e-3, atol=1e-4)


def test_drafters_see_no_hidden_states_of_steps_without_room_for_drafts(
    tmp_path: Path, watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookline.core.speculation.speculation.TOKEN_ROWS", (7,))
    save_checkpoint(CONFIGS["llama"], tmp_path)
    params = [SamplingParams(max_tokens=8 + 8 * (index < 3), ignore_eos=True) for index in range(4)]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "engine": SMALL}
    with LLM(model={"name": "llama", "checkpoint": str(tmp_path)}, drafter="watching", **options) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [len(output.token_ids) for output in outputs] == [16, 16, 16, 8]
    seen = [sorted(watching.streams_of(id_, 0)) for id_ in range(4)]
    assert not seen[3]
    for prompt, places in zip(PROMPTS[:3], seen[:3], strict=True):
        assert places and places == list(range(places[0], len(prompt) + 14)) and places[0] >= len(prompt) + 6


def refused(cls: Any, config: Any, model: str, folder: Path, error: type[Exception], told: str) -> None:
    """Making the drafter says this, in one line. config: its dataclass."""
    fields = {name: value for name, value in vars(config).items() if value}
    with pytest.raises(error, match=told) as raised:
        drafter_of(cls, config, model, folder, {"name": cls.__name__.lower(), **fields})
    assert "\n" not in str(raised.value)


def random_model(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Its option."""
    return {"name": name, "checkpoint": "", "weights": "random", "random_shape": shape}


def _drop(weights: dict[str, Tensor], beginning: str) -> None:
    for name in [name for name in weights if name.startswith(beginning)]:
        del weights[name]


def test_what_has_no_layer_for_drafts_is_refused_by_name(tmp_path: Path) -> None:
    def shorten(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.eh_proj.weight"] = torch.zeros(36, 36)

    save_nextn(RIGHT, tmp_path / "short", shorten)
    told = r"drafter=mtp cannot read its layer from .*short: .*eh_proj.weight has \[36, 36\] and needs \[36, 72\]"
    refused(Mtp, MtpConfig(), "deepseek", tmp_path / "short", CheckpointError, told)
    save_nextn(RIGHT, tmp_path / "without", lambda weights: _drop(weights, "model.layers.1."))
    told = r"drafter=mtp cannot read its layer from .*without: it has no tensors model.layers.1.\*"
    refused(Mtp, MtpConfig(), "deepseek", tmp_path / "without", CheckpointError, told)
    save_checkpoint(LLAMA, tmp_path / "llama")
    told = "drafter=mtp: the model plugin Llama reads no layer of its checkpoints that drafts tokens"
    refused(Mtp, MtpConfig(), "llama", tmp_path / "llama", ConfigError, told)
    told = "drafter 'mtp' .* does not fit: layers of this model keep a state"
    with pytest.raises(PluginError, match=told):
        LLM(
            model=random_model("qwen3_5", CONFIGS["qwen3_5"]),
            drafter="mtp",
            device="cpu",
            engine=SMALL,
        )


def test_eagle_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(LLAMA, tmp_path / "model")
    config = eagle_config(LLAMA, num_key_value_heads=2)
    weights = eagle_weights(config, LLAMA["hidden_size"])
    told = r"drafter=eagle3 needs drafter\.checkpoint=FOLDER or HUB_ID"
    refused(Eagle3, Eagle3Config(layers=[0, 1, 2]), "llama", tmp_path / "model", ConfigError, told)
    without = {name: one for name, one in weights.items() if name != "d2t"}
    read = "drafter=eagle3 cannot read its head .*: "
    cases: list[tuple[dict[str, Any], Mapping[str, Tensor], type[Exception], str]] = [
        ({"hidden_size": 48}, weights, ConfigError, "is for a model with hidden states of 48, and this one has 32"),
        ({"vocab_size": 95}, weights, ConfigError, "is for a model with a vocabulary of 95, and this one has 96"),
        ({"draft_vocab_size": 97}, weights, ConfigError, "draft_vocab_size = 97; supported: at most vocab_size = 96"),
        ({"norm_before_fc": True}, weights, ConfigError, "does not support norm_before_fc = True"),
        ({"num_hidden_layers": 2}, weights, ConfigError, "does not support num_hidden_layers = 2"),
        ({"eagle_config": {}}, weights, ConfigError, r"after layers \[1, 0, -1\], which are not .* drafter\.layers"),
        ({"intermediate_size": 44}, weights, CheckpointError, read + ".*3 misshaped tensors"),
        ({}, {**weights, "midlayer.self_attn.q_norm.weight": torch.ones(8)}, CheckpointError, read + ".*q_norm.weight"),
        ({}, {"norm.weight": weights["norm.weight"]}, CheckpointError, read + r"it has neither midlayer\.\* nor"),
        ({"draft_vocab_size": 40}, without, CheckpointError, read + "(?=.*1 missing tensor: d2t)"),
        ({}, {**weights, "d2t": weights["d2t"] + 1}, CheckpointError, read + "d2t names tokens from 1 to 96"),
    ]
    for index, (changed, tensors, error, told) in enumerate(cases):
        head = tmp_path / f"head{index}"
        save_weights({**config, **changed}, tensors, head)
        refused(Eagle3, Eagle3Config(str(head)), "llama", tmp_path / "model", error, told)


@pytest.mark.parametrize(
    ("form", "layers", "chosen"),
    [
        ({}, 36, (1, 17, 32)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, 48, (1, 23, 44)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, 36, (1, 17, 32)),
    ],
)
def test_the_layers_are_those_that_a_head_was_trained_with(
    form: dict[str, Any], layers: int, chosen: tuple[int, ...]
) -> None:
    assert read_config({**eagle_config(LLAMA), "eagle_config": None, **form}, layers).layers == chosen


def test_heads_of_speculators_are_read() -> None:
    inner = {key: one for key, one in eagle_config(LLAMA).items() if key not in ("architectures", "eagle_config")}
    stated = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": 40, "target_hidden_size": None}
    shape = read_config({**stated, "transformer_layer_config": inner, "norm_before_residual": None}, 36)
    assert (shape.num_drawn, shape.model_hidden, shape.norms_residual, shape.layers) == (40, 32, True, (1, 17, 32))


@pytest.mark.parametrize("drafter", ["mtp", {"name": "eagle3", "layers": [0, 1]}], ids=["mtp", "eagle3"])
def test_random_weights_have_a_random_head(drafter: Any) -> None:
    with LLM(
        model=random_model("deepseek", NEXTN), drafter=drafter, device="cpu", dtype="float32", engine=SMALL
    ) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))
        assert llm.engine.speculation is not None and llm.engine.speculation.num_drafted > 0


def test_a_drafter_that_fails_when_it_is_shown_hidden_states_is_named(
    tmp_path: Path, watching: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(CONFIGS["llama"], tmp_path)
    drafter = {"name": "watching", "fails": True}
    with LLM(model={"name": "llama", "checkpoint": str(tmp_path)}, drafter=drafter, device="cpu", engine=SMALL) as llm:
        (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8
    told = [one.getMessage() for one in caplog.records if "go on without its drafts" in one.getMessage()]
    assert len(told) == 1 and "fails in observe: RuntimeError: cannot look" in told[0]
