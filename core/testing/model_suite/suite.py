"""The conformance suite of models: subclass it in your tests, name the class and give a small config.json.

The model runs with random weights over core/testing/plain_kernels, without an engine; ranks are threads. Only
`reference` can show that the formulas are the paper's. Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import ATTENTION_FEATURES, WeightTarget
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError
from hookline.core.kv_cache.groups import keeps_tokens
from hookline.core.testing.checks import check, check_close, check_contract, check_nothing_kept
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.model_suite.driver import Chunk, ModelDriver, fill, stored_weights, tensors_with_nan
from hookline.core.testing.model_suite.stage_checks import check_stages
from hookline.core.testing.model_suite.thread_ranks import on_ranks

TOLERANCE = 1e-4
"""Relative error allowed: float32 sums in another order, through layers with weights far larger than real ones."""
REFERENCE = "hookline.core.testing.plain_kernels"
"""The kernels over which models are tested; these themselves may wait for the host."""
NO_SUCH_ROPE = {"rope_type": "no_such_rope", "factor": 2.0}
ABOUT_HEADS = {"rope_scaling", "num_attention_heads", "num_key_value_heads"}
"""Keys of config.json that a model without attention may not read."""


class ModelSuite:
    """`class TestMyModel(ModelSuite): model_class = MyModel; def hf_config(self): return {…}`.

    Keep the config small: two layers or more, a vocabulary of tens, max_position of at least 16. dtypes and device
    narrow the tests. ranks: numbers of ranks that split the config. uses_positions: False for a model without any
    notion of position. unused_weights: names of tensors that are loaded but may have no effect.
    captures_prompts: True for a model with states that computes prompts without their lengths on the host, as a
    captured step of kernels with `graph_prefill` has them; its states are then tested without. sizes_alike: as in the
    entry's Needs.
    """

    model_class: ClassVar[Any] = None
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    device: ClassVar[str] = "cpu"
    ranks: ClassVar[Sequence[int]] = (2,)
    uses_positions: ClassVar[bool] = True
    unused_weights: ClassVar[Sequence[str]] = ()
    captures_prompts: ClassVar[bool] = False
    sizes_alike: ClassVar[bool] = False

    def hf_config(self) -> dict[str, Any]:
        """A small config.json."""
        raise NotImplementedError("return a small config.json from hf_config()")

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor | None:
        """Logits (T, V) of a prompt from another implementation with these weights; None if there is none."""
        return None

    def refused_configs(self) -> list[dict[str, Any]]:
        """Changes to hf_config that `spec` must refuse; None stands for a missing key. Extend it.

        Changes of heads and their rotation are left out if no layer of `spec` has attention.
        """
        config = self.hf_config()
        changes: list[dict[str, Any]] = [
            {"model_type": "no_such_model"},
            {"rope_scaling": NO_SUCH_ROPE, "rope_parameters": NO_SUCH_ROPE},
            {"rope_scaling": NO_SUCH_ROPE, "rope_parameters": None},
            {"rope_scaling": None, "rope_parameters": NO_SUCH_ROPE},
            {"quantization_config": {"quant_method": "no_such_method"}},
            {"num_hidden_layers": None},
            {"num_hidden_layers": 0},
            {"num_attention_heads": "many"},
            {"num_key_value_heads": config.get("num_attention_heads", 1) + 1},
            {"hidden_size": 0},
            {"vocab_size": -1},
        ]
        if keeps_tokens(self.model_class.spec(config)):
            return changes
        return [change for change in changes if not change.keys() & ABOUT_HEADS]

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("model", self.model_class)

    def test_spec_holds_whole_positive_numbers(self) -> None:
        """And reading it changes nothing."""
        config = self.hf_config()
        before = deepcopy(config)
        spec = self.model_class.spec(config)
        check(config == before, "spec changed the hf_config it was given")
        for field in fields(spec):
            value = getattr(spec, field.name)
            if field.name in ("layers", "attention") or (field.name == "value_dim" and value is None):
                continue
            check(isinstance(value, int) and value > 0, f"spec.{field.name} = {value!r} must be a positive int")
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        is_part = spec.value_dim is None or spec.value_dim <= spec.head_dim
        check(is_part, f"spec.value_dim = {spec.value_dim} must be at most head_dim = {spec.head_dim}")
        check(heads % kv_heads == 0, f"spec: {heads} heads cannot share {kv_heads} kv heads evenly")
        lengths = (len(spec.cache_layers), spec.num_layers)
        check(lengths[0] == lengths[1], f"spec.layers has {lengths[0]} layers and num_layers is {lengths[1]}")
        unknown = sorted(spec.attention - set(ATTENTION_FEATURES))
        check(not unknown, f"spec.attention asks for {unknown}; there is {list(ATTENTION_FEATURES)}")

    def test_spec_refuses_what_the_model_does_not_implement(self) -> None:
        """ConfigError for unknown rope and model types, quantised weights and senseless sizes."""
        for change in self.refused_configs():
            config = {key: value for key, value in {**self.hf_config(), **change}.items() if value is not None}
            try:
                self.model_class.spec(config)
            except ConfigError as error:
                check(bool(str(error)), f"the ConfigError for {change} has no message")
            except Exception as error:
                raise AssertionError(f"spec raises {type(error).__name__}, not ConfigError, for {change}") from error
            else:
                raise AssertionError(f"spec accepts {change} and must raise ConfigError")

    def test_forward_and_logits_have_the_shapes_that_spec_says(self) -> None:
        """Hidden size, vocabulary, layers and heads, in every dtype, for one token and for many."""
        for dtype in self.dtypes:
            driver = ModelDriver(self.model_class, self.hf_config(), dtype=dtype, device=self.device)
            for prompt in (self._prompt(1), self._prompt(7)):
                logits_TV = driver.logits(Chunk(0, 0, prompt))
                check(bool(logits_TV.isfinite().all()), f"logits in {dtype} are not finite")

    def test_logits_are_computed_row_by_row(self) -> None:
        """Logits of some rows equal the same rows of the logits of all."""
        driver = self._driver()
        hidden_TD = driver.hidden(driver.batch([Chunk(0, 0, self._prompt())]))
        with torch.inference_mode():
            whole_TV, some_NV = driver.model.logits(hidden_TD), driver.model.logits(hidden_TD[[4, 1]])
        what = "logits of two rows, compared with the same rows of all logits"
        check_close(what, some_NV, whole_TV[[4, 1]], TOLERANCE)

    def test_every_parameter_is_loaded(self) -> None:
        """Parameters are NaN before weight_targets are filled, and nothing may be NaN after."""
        driver = self._driver()
        tokens = range(driver.spec.vocab_size)
        for first in range(0, len(tokens), driver.attention.max_model_len):
            logits_TV = driver.logits(Chunk(0, 0, tokens[first : first + driver.attention.max_model_len]))
            unset = ", ".join(tensors_with_nan(driver.model)[:5])
            is_nan = bool(logits_TV.isnan().any())
            check(not is_nan, f"not every parameter is in weight_targets; still unset: {unset or 'not found'}")

    def test_every_weight_changes_the_logits(self) -> None:
        """A tensor that is read and changes nothing went to the wrong place, or one overwrote another."""
        driver = self._driver()
        chunks = [Chunk(0, 0, self._prompt()), Chunk(1, 0, self._prompt(9)[::-1])]
        before_TV = driver.logits(*chunks)
        for name, target in driver.targets.items():
            for view in (piece.view for piece in target.pieces if name not in self.unused_weights):
                assert view is not None
                with torch.inference_mode():
                    view.copy_(view.flip(0) * 1.5 + 0.25 if view.is_floating_point() else ~view)
                changed = not torch.equal(driver.logits(*chunks), before_TV)
                check(changed, f"the weight {name} changes no logits: it is loaded to the wrong place, or never used")
                fill(driver.targets)

    def test_a_head_of_its_own_is_loaded(self) -> None:
        """Where tie_word_embeddings is false the head is the checkpoint's, unless `spec` refuses one of the values."""
        loaded = list[set[str]]()
        for is_tied in (False, True):
            config = {**self.hf_config(), "tie_word_embeddings": is_tied}
            if "text_config" in config:  # of a checkpoint that does more than text
                config["text_config"] = {**config["text_config"], "tie_word_embeddings": is_tied}
            try:
                self.model_class.spec(config)
            except ConfigError:
                return
            targets = ModelDriver(self.model_class, config, device=self.device).targets
            loaded.append({name for name, target in targets.items() if target.view is not None})
        told = (
            "tie_word_embeddings changes nothing that is loaded; use it, or have spec refuse what it does not implement"
        )
        check(bool(loaded[0] - loaded[1]), told)

    def test_weight_targets_have_the_shapes_they_claim(self) -> None:
        """The part of a checkpoint tensor that is read has its view's shape."""
        for ranks in (LocalRanks(), *(LocalRanks(rank, size) for size in self.ranks for rank in range(size))):
            for name, target in ModelDriver(self.model_class, self.hf_config(), ranks).targets.items():
                for piece in target.pieces:
                    assert piece.view is not None
                    got, wanted = piece.cut(torch.empty(target.shape)).shape, piece.view.shape
                    where = f"on rank {ranks.rank} of {ranks.size}"
                    check(got == wanted, f"{name}: {tuple(got)} is read into a view of {tuple(wanted)} {where}")

    def test_a_prompt_in_chunks_gives_what_it_gives_at_once(self) -> None:
        """A prompt in one chunk, in two, and token by token; all on one object, which keeps nothing but the cache."""
        prompt = self._prompt()
        driver = self._driver()
        whole_TV = driver.logits(Chunk(0, 0, prompt))
        for sizes in ([len(prompt)], [5, len(prompt) - 5], [1] * len(prompt), [7] + [1] * (len(prompt) - 7)):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            pieces = [Chunk(1, start, prompt[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
            parts_TV = torch.cat([driver.logits(piece) for piece in pieces])
            check_close(f"logits of a prompt computed in chunks of {sizes}", parts_TV, whole_TV, TOLERANCE)

    def test_a_prompt_in_a_batch_gives_what_it_gives_alone(self) -> None:
        """Decodes and prompts of different lengths in one step."""
        prompts = [self._prompt(length)[::-1] for length in (9, 4, 6, 1)]
        alone = [self._driver().logits(Chunk(0, 0, prompt)) for prompt in prompts]
        driver = self._driver()
        driver.logits(Chunk(0, 0, prompts[0][:-1]))
        chunks = [Chunk(0, 8, prompts[0][-1:]), *(Chunk(row, 0, prompts[row]) for row in (1, 2, 3))]
        batched_TV = driver.logits(*chunks)
        expected_TV = torch.cat([alone[0][-1:], *alone[1:]])
        check_close("logits of prompts in one batch, compared with each alone", batched_TV, expected_TV, TOLERANCE)

    def test_rows_that_are_wanted_are_those_of_all(self) -> None:
        """A forward may compute its last layer for the wanted rows alone; their results are the same as among all."""
        prompts = [self._prompt(length)[::-1] for length in (9, 4, 6)]
        driver = self._driver()
        driver.hidden(driver.batch([Chunk(0, 0, prompts[0][:-1])]))
        batch = driver.batch([Chunk(0, 8, prompts[0][-1:]), *(Chunk(row, 0, prompts[row]) for row in (1, 2))])
        whole_TD = driver.hidden(batch)
        for rows in ([10], [0, 4, 10], [10, 0, 0, 4, 3]):
            rows_N = torch.tensor(rows, device=self.device)
            some_ND = driver.hidden(batch, rows_N)
            if len(some_ND) == batch.num_tokens:
                some_ND = some_ND.index_select(0, rows_N)
            what = f"hidden states of tokens {rows}, wanted alone, compared with the same of all"
            check_close(what, some_ND, whole_TD.index_select(0, rows_N), TOLERANCE)

    def test_forward_and_logits_never_wait_for_the_host(self) -> None:
        """Decode steps are captured as CUDA graphs, whatever the model."""
        driver = self._driver()
        driver.logits(Chunk(0, 0, self._prompt(8)))
        batch = driver.batch([Chunk(0, 8, self._prompt(9)[-1:])])
        with torch.no_grad():
            with no_host_sync("forward", but=(REFERENCE,)):
                hidden_TD = driver.model.forward(batch.token_ids_T, batch.positions_T, driver.attend_of(batch))
            with no_host_sync("logits", but=(REFERENCE,)):
                driver.model.logits(hidden_TD)
            batch, rows_N = driver.batch([Chunk(1, 0, self._prompt(5))]), torch.tensor([4, 1], device=self.device)
            with no_host_sync("forward", but=(REFERENCE,)):
                driver.model.forward(batch.token_ids_T, batch.positions_T, driver.attend_of(batch, rows_N))

    def test_another_number_of_tokens_leaves_nothing_behind(self) -> None:
        """Models that do not declare sizes_alike pass."""
        if not self.sizes_alike:
            return
        driver = self._driver()
        self._compute(driver, 3)
        for num_tokens in (1, 5):
            with check_nothing_kept(f"a step of {num_tokens} tokens"):
                self._compute(driver, num_tokens)

    def _compute(self, driver: ModelDriver, num_tokens: int) -> None:
        """Without `driver.logits`, since the driver keeps the states of recurrent layers."""
        batch = driver.batch([Chunk(0, 0, self._prompt(num_tokens))])
        with torch.no_grad():
            hidden_TD = driver.model.forward(batch.token_ids_T, batch.positions_T, driver.attend_of(batch))
            driver.model.logits(hidden_TD)

    def test_the_same_step_gives_the_same_logits(self) -> None:
        """Not a bit differs when it is computed again: nothing is drawn, and nothing counts the steps."""
        driver, chunk = self._driver(), Chunk(0, 0, self._prompt())
        first_TV, second_TV = driver.logits(chunk), driver.logits(chunk)
        check(torch.equal(first_TV, second_TV), "the same step computed again gives other logits")

    def test_positions_matter(self) -> None:
        """The same tokens further apart give other logits; and the last position of all works."""
        if not self.uses_positions:
            return
        driver = self._driver()
        batch = driver.batch([Chunk(0, 0, self._prompt(5))])
        near_TV = driver.logits(batch=batch)
        last = driver.spec.max_position - 1
        for positions in ([0, 2, 5, 9, 12], [0, 1, 2, 3, last]):
            far_TV = driver.logits(batch=replace(batch, positions_T=torch.tensor(positions, device=self.device)))
            check(bool(far_TV.isfinite().all()), f"logits at positions {positions} are not finite")
            differs = not torch.allclose(far_TV[-1], near_TV[-1], rtol=0, atol=1e-3)
            check(differs, f"positions are ignored: {positions} give the logits of positions 0 to 4")

    def test_several_ranks_give_what_one_does(self) -> None:
        """Each rank holds its share of every tensor, and their shards of the vocabulary join to the whole."""
        chunk, whole = Chunk(0, 0, self._prompt()), self._driver()
        whole_TV = whole.logits(chunk)
        for size in self.ranks:
            drivers = [ModelDriver(self.model_class, self.hf_config(), LocalRanks(rank, size)) for rank in range(size)]
            self._check_shards(whole.targets, [driver.targets for driver in drivers])
            shards = on_ranks(size, lambda ranks: self._driver(ranks).logits(chunk))
            joined_TV = torch.cat(shards, -1)[:, : whole.spec.vocab_size]
            check_close(f"logits of {size} ranks, joined", joined_TV, whole_TV, TOLERANCE)

    def test_stages_one_after_the_other_give_what_the_whole_model_does(self) -> None:
        """If the model says `runs_in_stages`: see `hookline.core.testing.model_suite.stage_checks`."""
        if getattr(self.model_class, "runs_in_stages", False):
            check_stages(self.model_class, self.hf_config(), Chunk(0, 0, self._prompt()), self.device, TOLERANCE)

    def test_states_need_no_lengths_on_the_host(self) -> None:
        """A step of decodes and chunks gives the same without them; if the author says so."""
        if not self.captures_prompts:
            return
        driver, prompt = self._driver(), self._prompt()
        for sequence in range(2):
            driver.logits(Chunk(sequence, 0, prompt[: 6 + sequence]))
        chunks = [Chunk(0, 6, prompt[6:7]), Chunk(1, 7, prompt[7:]), Chunk(2, 0, prompt[:5])]
        with_lengths_TV = driver.logits(*chunks)
        driver.lengths_on_host = False
        check_close("logits of a step without lengths on the host", driver.logits(*chunks), with_lengths_TV, TOLERANCE)

    def test_logits_are_those_of_the_reference(self) -> None:
        """If the author has one."""
        driver, prompt = self._driver(), self._prompt()
        expected_TV = self.reference(stored_weights(driver.targets), prompt)
        if expected_TV is not None:
            actual_TV = driver.logits(Chunk(0, 0, prompt))
            check_close("logits, compared with the reference,", actual_TV, expected_TV, TOLERANCE)

    def _driver(self, ranks: LocalRanks | None = None) -> ModelDriver:
        return ModelDriver(self.model_class, self.hf_config(), ranks, device=self.device)

    def _prompt(self, num_tokens: int = 11) -> list[int]:
        """Different tokens, scattered over the vocabulary."""
        vocab_size = self.model_class.spec(self.hf_config()).vocab_size
        scattered = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
        return [int(scattered[index % vocab_size]) for index in range(num_tokens)]

    def _check_shards(self, whole: Mapping[str, WeightTarget], parts: Sequence[Mapping[str, WeightTarget]]) -> None:
        for rank, targets in enumerate(parts):
            check(set(targets) == set(whole), f"rank {rank} of {len(parts)} wants other tensors than a single rank")
        for name, target in whole.items():
            if target.view is None:
                continue
            shapes = {part[name].shape for part in parts} | {target.shape}
            check(len(shapes) == 1, f"{name}: ranks disagree on the tensor's shape in the checkpoint: {shapes}")
            index = torch.arange(max(1, int(torch.Size(target.shape).numel()))).view(target.shape)
            pieces = [piece for part in parts for piece in part[name].pieces]
            held = {int(at) for piece in pieces for at in piece.cut(index).flatten()}
            total = index.numel()
            check(len(held) == total, f"{len(parts)} ranks together hold {len(held)} of {total} elements of {name}")
