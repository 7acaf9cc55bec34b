"""Marks of a device are counted as it passes them, beyond the numbers there are, and never put into a graph."""

import pytest
import torch

from hookline.core.distributed import heartbeat as device_marks
from hookline.core.distributed.heartbeat import DeviceMarks


@pytest.fixture
def marks(monkeypatch):
    monkeypatch.setattr(device_marks, "NUM_NUMBERS", 16)
    monkeypatch.setattr(device_marks, "SideStream", lambda device: lambda work: work())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return DeviceMarks(torch.device("cpu"))


def test_marks_are_counted_beyond_their_numbers(marks):
    assert marks.num_reached() == 0
    found = []
    for count in (1, 3, 0, 7, 7, 2):
        for _ in range(count):
            marks.mark()
        found.append(marks.num_reached())
    assert found == [1, 4, 4, 11, 18, 20]


def test_a_capture_gets_no_mark(marks, monkeypatch):
    marks.mark()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    marks.mark()
    assert marks.num_reached() == 1
