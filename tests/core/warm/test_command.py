"""`python -m core.warm`: what it refuses, each in a line."""

import pytest

from hookline.core.info.sources import field_facts
from hookline.core.warm.command import main
from hookline.core.warm.settings import WarmKeys

KNOWN = ("a100", "rtx3090", "rtx4090", "l4", "l40s", "h100", "h200", "b200", "rtx5090")
NO_GPU = f"there is no GPU here to compile for; name one: {', '.join(f'card={name}' for name in KNOWN)}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["card=h20"], f"card=h20 is not known; known are: {', '.join(KNOWN)}"),
        (["card=h200", "tp=2"], "tp=2: kernels of several ranks are compiled when their engine starts"),
        (["card=h200", "processes=0"], "processes=0 must be at least 1, or null"),
        (["card=h200", "kernels=torch"], "kernels=torch compile nothing ahead; on a GPU, kernels=triton does"),
        (["card=h200", "-m"], "kernels are compiled for one configuration; leave out -m (--multirun)"),
    ],
)
def test_a_mistake_is_one_line(arguments, told, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"hookline: error: {told}"


def test_the_help_names_every_card():
    (card,) = (one for one in field_facts(WarmKeys) if one["name"] == "card")
    assert all(f" {name}" in card["doc"] for name in KNOWN)
