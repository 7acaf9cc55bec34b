"""How layers are cut into groups: places in blocks of equal bytes, and what a sequence holds of them."""

from itertools import accumulate

import pytest

from hookline.core.contracts import FullAttention, ModelSpec, NoCache, RecurrentState, SharedCache, SlidingWindow
from hookline.core.contracts.cache import StateTensor
from hookline.core.errors import ConfigError
from hookline.core.kv_cache.groups import CacheGroups, first_seen

FULL = FullAttention()


def groups_of(layers, max_model_len=8192):
    return CacheGroups.of(ModelSpec(len(layers), 1, 1, 8, 8, 8, 131072, tuple(layers)), max_model_len)


def every(period, window, num_layers):
    """Windows, and full attention in each layer whose number is a multiple of the period."""
    return [FULL if (index + 1) % period == 0 else SlidingWindow(window) for index in range(num_layers)]


MODELS = {
    "Gemma3-4B": (every(6, 1024, 34), 5, (None, *[1024] * 6)),
    "gpt-oss-20b": (every(2, 128, 24), 12, (None, 128)),
    "OLMo3-7B": (every(4, 4096, 32), 8, (None, *[4096] * 3)),
    "Mistral-7B-v0.1": ([SlidingWindow(4096)] * 32, 32, (4096,)),
    "Gemma3-27B": (every(6, 1024, 62), 11, (None, *[1024] * 5)),
    "one window": ([FULL] * 32 + [SlidingWindow(64)], 8, (None, None, None, None, 64)),
    "Qwen3": ([FULL] * 28, 28, (None,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_models_that_people_run_are_cut_with_little_padding(name):
    layers, num_places, windows = MODELS[name]
    groups = groups_of(layers)
    assert (groups.num_places, groups.windows) == (num_places, windows)
    assert len(set(groups.places)) == len(layers), "two layers lie in the same place"
    assert groups.num_places * groups.num_groups - len(layers) <= 7
    for layer, (group, place) in zip(layers, groups.places, strict=True):
        assert place < num_places
        assert windows[group] == (None if layer == FULL else layer.num_tokens)


CUTS = {
    "Gemma3-27B": ([31, 31], (None, *[1024] * 6), [5, 5]),
    "Gemma3-4B": ([17, 17], (None, *[1024] * 5), [3, 3]),
    "gpt-oss-20b": ([13, 11], (None, 128), [7, 6]),
    "Qwen3": ([10, 9, 9], (None,), [10, 9, 9]),
    "one window": ([17, 16], (None, None, None, 64), [6, 5]),
}
"""Layers of each stage, the groups' windows, and how many places each stage's blocks have."""


@pytest.mark.parametrize("name", CUTS)
def test_each_stage_deals_its_own_layers_out_to_all_groups(name):
    layers, (counts, windows, num_places) = MODELS[name][0], CUTS[name]
    groups = CacheGroups.of(ModelSpec(len(layers), 1, 1, 8, 8, 8, 131072, tuple(layers)), 8192, counts)
    ends = list(accumulate(counts))
    stages = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    assert groups.windows == windows
    assert [groups.num_places_of(stage) for stage in stages] == num_places
    assert max(num_places) <= groups.num_places
    for stage in stages:
        assert len({groups.places[layer] for layer in stage}) == len(stage), "two layers lie in the same place"
        for layer in stage:
            group, _ = groups.places[layer]
            assert windows[group] == (None if layers[layer] == FULL else layers[layer].num_tokens)


@pytest.mark.parametrize("name", MODELS)
def test_a_single_stage_has_the_groups_and_the_places_of_a_model_that_is_not_cut(name):
    layers, num_places, _ = MODELS[name]
    spec = ModelSpec(len(layers), 1, 1, 8, 8, 8, 131072, tuple(layers))
    assert CacheGroups.of(spec, 8192, [len(layers)]) == CacheGroups.of(spec, 8192)
    assert CacheGroups.of(spec, 8192).num_places_of(range(len(layers))) == num_places


def test_a_stage_without_keys_and_values_has_no_places_and_the_others_have_theirs():
    state = RecurrentState((("mean", StateTensor((8,))),))
    groups = CacheGroups.of(ModelSpec(4, 1, 1, 8, 8, 8, 64, (state, FULL, NoCache(), state)), 64, [2, 2])
    assert [groups.num_places_of(stage) for stage in (range(2), range(2, 4))] == [1, 0]
    assert not groups.is_by_layer


def test_a_layer_that_shares_the_cache_of_another_stages_layer_is_refused():
    spec = ModelSpec(3, 1, 1, 8, 8, 8, 64, (FULL, FULL, SharedCache(0)))
    with pytest.raises(ConfigError, match=r"layer 2 of the model shares the cache of layer 0, .* stages 1 and 0; keep"):
        CacheGroups.of(spec, 64, [2, 1])
    assert CacheGroups.of(spec, 64, [3]).places[2] == (0, 0)


def test_a_model_with_full_attention_everywhere_is_one_group_whose_places_are_its_layers():
    groups = CacheGroups.of(ModelSpec(3, 1, 1, 8, 8, 8, 64), 64)
    assert groups.is_plain
    assert groups.places == ((0, 0), (0, 1), (0, 2))
    assert groups.is_by_layer


def test_a_window_that_no_sequence_outgrows_is_full_attention():
    assert groups_of([SlidingWindow(4096)] * 4, max_model_len=4096).is_plain
    assert not groups_of([SlidingWindow(4095)] * 4, max_model_len=4096).is_plain


def test_a_layer_that_shares_a_cache_has_the_place_of_the_other_and_none_of_its_own():
    groups = groups_of([FULL, SlidingWindow(8), SharedCache(1), NoCache(), SharedCache(0)])
    assert groups.places == ((0, 0), (1, 0), (1, 0), None, (0, 0))
    assert groups.writes == (True, True, False, False, False)
    assert groups.num_places == 1


def test_a_model_without_keys_and_values_has_one_group_without_places():
    groups = groups_of([RecurrentState((("mean", StateTensor((8,))),)), NoCache()])
    assert (groups.windows, groups.num_places, groups.has_states) == ((None,), 0, True)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([FULL, SlidingWindow(0)], r"spec\.layers\[1\] is a window of 0 tokens; 1 is the least"),
        ([SharedCache(0), FULL], r"spec\.layers\[0\] shares the cache of layer 0, which must be an earlier one with"),
        ([FULL, SharedCache(0), SharedCache(1)], r"spec\.layers\[2\] shares the cache of layer 1, which must be"),
        ([FULL, NoCache(), SharedCache(1)], r"spec\.layers\[2\] shares the cache of layer 1, which must be"),
    ],
)
def test_layers_that_contradict_each_other_are_refused(layers, said):
    with pytest.raises(ConfigError, match=said):
        groups_of(layers)


def test_another_number_of_layers_than_the_model_has_is_refused():
    with pytest.raises(ConfigError, match=r"spec\.layers has 2 entries for num_layers=3"):
        CacheGroups.of(ModelSpec(3, 1, 1, 8, 8, 8, 64, (FULL, FULL)), 64)


def test_a_query_sees_the_blocks_that_its_window_reaches_into():
    # A window of 5 at position 8 reaches back to position 4: block 1 of 4 tokens; at position 7 to position 3.
    assert [first_seen(position, 5, 4) for position in (0, 4, 7, 8, 11, 12)] == [0, 0, 0, 1, 1, 2]
    assert first_seen(8, 1, 4) == 2


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_batched", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_the_most_blocks_are_those_of_the_worst_chunk(window, num_batched, block_size):
    groups, worst = groups_of([FULL, SlidingWindow(window)]), 0
    for start in range(40):
        end = min(40, start + num_batched)
        seen = -(-end // block_size) - first_seen(start, window, block_size)
        worst = max(worst, -(-end // block_size) + seen)
    assert groups.most_blocks(40, block_size, num_batched) >= worst
    assert groups.most_blocks(40, block_size, num_batched) - worst <= 1


def test_the_longest_sequence_is_the_longest_whose_blocks_the_pool_has():
    groups = groups_of(every(2, 5, 4))
    for num_blocks in range(60):
        length = groups.longest(num_blocks, 4, 6, 1000)
        assert groups.most_blocks(length, 4, 6) <= num_blocks
        assert groups.most_blocks(length + 1, 4, 6) > num_blocks
    assert groups.longest(60, 4, 6, 50) == 50
