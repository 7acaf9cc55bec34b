"""What a stopwatch of the suites counts on a busy machine."""

from pathlib import Path

import pytest

from hookline.core.testing import stopwatch
from hookline.core.testing.stopwatch import Stopwatch


@pytest.mark.parametrize(
    ("thread_s", "stalled_s", "seconds"),
    [(1.0, 0.0, 3.0), (1.0, 1.5, 1.5), (2.0, 2.5, 2.0), (1.0, None, 3.0)],
)
def test_waiting_for_a_processor_is_not_counted_and_computing_is(
    thread_s: float, stalled_s: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times, path = {"wall": 10.0, "thread": 5.0}, tmp_path / "cpu"
    monkeypatch.setattr(stopwatch, "PRESSURE", path)
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: times["wall"])
    monkeypatch.setattr(stopwatch.time, "thread_time", lambda: times["thread"])
    if stalled_s is not None:
        path.write_text("some avg10=9.00 avg60=8.00 avg300=5.00 total=7000000\nfull avg10=0.00 total=0\n")
    watch = Stopwatch()
    times.update(wall=13.0, thread=5.0 + thread_s)
    if stalled_s is not None:
        path.write_text(f"some avg10=9.00 avg60=8.00 avg300=5.00 total={int(7e6 + stalled_s * 1e6)}\nfull total=0\n")
    assert watch.seconds == pytest.approx(seconds)
