"""Tiles by the shared memory of a card: what was fastest on Hopper where there is room, less of it elsewhere."""

from itertools import product as product_of

import pytest
import torch

from hookline.core.errors import ConfigError

pytest.importorskip("triton")

from hookline.core.prebuild.pretended import CARDS
from hookline.plugins.kernels.attention.triton_prefill import prefill_tiling
from hookline.plugins.kernels.attention.triton_schedule import decode_tiling
from hookline.plugins.kernels.attention.triton_shared_prefix import shared_tiling
from hookline.plugins.kernels.experts.triton_routing import clamped_tiling, fitting_cut, tiling
from hookline.plugins.kernels.invariant.triton_attention import AttentionTiling
from hookline.plugins.kernels.invariant.triton_experts import only_tiling
from hookline.plugins.kernels.products.triton_row_product import STEP_BYTES, TILES, fitting_row_tile, row_tiles
from hookline.plugins.kernels.triton_card import Card, Room

HAVE = {name: Card(card.num_sms, card.shared_memory_bytes, card.compute_capability[0]) for name, card in CARDS.items()}
HOPPER, TINY = HAVE["h200"], Card(8, 20_000, 8)
HEADS = list(product_of((64, 80, 128, 256), (torch.bfloat16, torch.float32), (1, 4, 8, 32)))


def under_way(num_stages, card):
    """Steps of a loop that lie in shared memory."""
    return num_stages if card.major in (9, 10) else max(1, num_stages - 1)


def attention_bytes(one, queries, head_dim, dtype, card):
    """Queries, and the keys and values of the tiles that are under way."""
    return dtype.itemsize * head_dim * (queries + 2 * one.tile * under_way(one.num_stages, card))


@pytest.mark.parametrize("card", HAVE.values(), ids=HAVE)
@pytest.mark.parametrize("num_weights", [1, 2], ids=["one weight", "gate and up"])
def test_a_batch_invariant_product_fits_every_card(card, num_weights):
    for tile in row_tiles(num_weights, torch.bfloat16):
        one = fitting_row_tile(tile, num_weights, card)
        assert (one.block_t, one.block_o) == (tile.block_t, tile.block_o), "every card has room for two steps"
        step = (one.block_t + one.block_o * num_weights) * STEP_BYTES
        assert under_way(one.num_stages, card) * step < card.shared_memory_bytes
        assert one == tile or card.shared_memory_bytes < 200_000


@pytest.mark.parametrize("card", HAVE.values(), ids=HAVE)
def test_attention_with_heads_of_any_width_fits_every_card(card):
    for head_dim, dtype, group in HEADS:
        chosen = [AttentionTiling.of(group, head_dim, dtype, card, decodes=decodes) for decodes in (False, True)]
        chosen += [prefill_tiling(tokens, 4096, 8 * group, group, head_dim, dtype, card) for tokens in (1, 100_000)]
        chosen += [shared_tiling(queries, 8, head_dim, dtype, card) for queries in (1, 1000)]
        assert all(one.block_m >= group for one in chosen[:4]), "a tile has the heads of a token"
        for one in chosen:
            assert attention_bytes(one, one.block_m, head_dim, dtype, card) < card.shared_memory_bytes
        for rows in (1, 16, 40, 100, 150, 512):
            one = decode_tiling(rows, 8, head_dim, dtype, card, group)
            assert attention_bytes(one, group, head_dim, dtype, card) < card.shared_memory_bytes


@pytest.mark.parametrize("card", HAVE.values(), ids=HAVE)
def test_a_decode_takes_the_positions_of_a_prompt_in_the_same_steps_on_every_card(card):
    for head_dim, dtype, group in HEADS:
        of = [AttentionTiling.of(group, head_dim, dtype, card, decodes=decodes) for decodes in (False, True)]
        assert of[0].tile == of[1].tile and of[0].by_products == of[1].by_products


@pytest.mark.parametrize("card", HAVE.values(), ids=HAVE)
def test_products_of_experts_keep_their_tiles_on_every_card(card):
    choices = [choice(pairs, 8, itemsize) for choice in (tiling, clamped_tiling) for pairs, itemsize in SIZES]
    for cut in [*choices, only_tiling(2), only_tiling(4)]:
        fitted = fitting_cut(cut, 2, card)
        assert (fitted.gate_up[:3], fitted.down[:3]) == (cut.gate_up[:3], cut.down[:3])
        assert fitted == cut or card.shared_memory_bytes < 200_000


SIZES = list(product_of((8, 200, 300, 10_000), (2, 4)))


def test_stages_are_as_many_as_there_is_room_for_beside_what_stays():
    ada = HAVE["rtx4090"]
    assert ada.most_stages(Room(24 << 10)) == 5, "four steps in shared memory, one in registers"
    assert ada.most_stages(Room(24 << 10, 48 << 10)) == 3
    assert ada.most_stages(Room(98 << 10)) == 0
    assert HOPPER.most_stages(Room(24 << 10)) == 9


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (
            lambda: AttentionTiling.of(64, 256, torch.float32, HAVE["rtx4090"]),
            "attention with heads of 256 float32 numbers needs 104,448 bytes of shared memory for a program, and this "
            "card has 101,376",
        ),
        (
            lambda: fitting_row_tile(TILES[-1], 2, TINY),
            "a batch-invariant product needs 20,480 bytes of shared memory for a program, and this card has 20,000",
        ),
        (
            lambda: fitting_cut(only_tiling(2), 2, Card(8, 8_000, 8)),
            "a product of experts needs 8,192 bytes of shared memory for a program, and this card has 8,000",
        ),
    ],
    ids=["attention", "a product", "experts"],
)
def test_a_card_without_room_for_the_smallest_tile_is_refused_in_a_line(choice, told):
    with pytest.raises(ConfigError, match=f"^kernels=triton: {told}; choose kernels=torch$"):
        choice()
