"""What it tells of each token, from end to end in an engine."""

from __future__ import annotations

from hookline_logitlens import LensArguments, LensConfig
from hookline_logitlens.extension import LogitLens

from hookline import LLM, SamplingParams
from hookline.core.testing.extension_suite import ExtensionSuite

SIZES = {"cpu_cache_gib": 0.1, "max_model_len": 128}


class TestLogitLens(ExtensionSuite):
    extension, arguments, config = LogitLens, LensArguments, LensConfig(layers=[0, 3], most=4)
    examples = ({"top": 1}, {"top": 4})


def params(top: int = 0) -> SamplingParams:
    extra = {"logitlens": {"top": top}} if top else {}
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, extra_args=extra)


def test_the_last_layer_says_what_is_drawn_and_others_keep_their_tokens() -> None:
    with LLM(device="cpu", engine=SIZES) as llm:
        (alone,) = llm.generate("def f(x):", params())
        plain, seen = llm.generate(["def f(x):"] * 2, [params(), params(2)])
        deltas = list(llm.stream("def f(x):", params(2)))
    assert plain.token_ids == seen.token_ids == alone.token_ids and plain.extensions is None
    assert seen.extensions is not None
    told = seen.extensions["logitlens"]
    assert len(told) == 12
    for layers, token_id in zip(told, seen.token_ids, strict=True):
        assert layers[-1]["top"][0]["id"] == token_id and all(len(layer["top"]) == 2 for layer in layers)
        assert 0 < layers[-1]["top"][1]["probability"] <= layers[-1]["top"][0]["probability"] <= 1
        assert isinstance(layers[0]["top"][0]["text"], str)
    streamed = [one for delta in deltas for one in (delta.extensions or {}).get("logitlens", [])]
    assert [[layer["top"][0]["id"] for layer in one] for one in streamed] == [
        [layer["top"][0]["id"] for layer in one] for one in told
    ]
