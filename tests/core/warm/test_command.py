"""`python -m core.warm`: what it refuses, each in a line."""

import pytest

from hookline.core.warm.command import main

NO_GPU = "there is no GPU here to compile for; name one: card=a100, card=h100, card=h200, card=l4, card=l40s"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["card=h20"], "card=h20 is not known; known are: a100, h100, h200, l4, l40s"),
        (["card=h200", "tp=2"], "tp=2: kernels of several ranks are compiled when their engine starts"),
        (["card=h200", "processes=0"], "processes=0 must be at least 1, or null"),
        (["card=h200", "kernels=torch"], "kernels=torch compile nothing ahead; on a GPU, kernels=triton does"),
        (["card=h200", "-m"], "kernels are compiled for one configuration; leave out -m (--multirun)"),
    ],
)
def test_a_mistake_is_one_line(arguments, told, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"hookline: error: {told}"
