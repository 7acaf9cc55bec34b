"""The warning that a server's observers write no metrics for /metrics."""

from __future__ import annotations

import pytest

from hookline.core.serve.engine_metrics import metrics_of, tell_of_metrics


class Writes:
    def text(self) -> str:
        return "a 1\n"


@pytest.mark.parametrize(
    ("observers", "told"),
    [
        ({}, None),
        (
            {"otel": object()},
            "observers=[otel] leaves /metrics without the engine's metrics; observers=[prometheus,otel]",
        ),
        ({"otel": object(), "mine": object()}, "observers=[prometheus,otel,mine] keeps both"),
        ({"otel": object(), "mine": Writes()}, None),
    ],
)
def test_a_server_says_that_other_observers_took_the_place_of_the_one_that_writes_metrics(
    observers: dict[str, object], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tell_of_metrics(observers)
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.messages[0]
    assert metrics_of(observers) == ("a 1\n" if "mine" in observers and told is None else "")
