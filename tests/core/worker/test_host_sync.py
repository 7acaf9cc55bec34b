"""What would make the host wait for a device is noticed on a CPU, and what would not is left alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.core.testing.host_sync import no_host_sync

X = torch.arange(6.0).view(2, 3)
COUNTS = torch.tensor([1, 2])
WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: X.sum().item(),
    "tolist": lambda: X.tolist(),
    "a condition": lambda: 1 if X[0, 0] > 1 else 0,
    "int": lambda: int(X[0, 0]),
    "float": lambda: [float(value) for value in X[0]],
    "an index": lambda: [1, 2, 3][COUNTS[0]],
    "in": lambda: 3.0 in X,
    "formatting": lambda: f"{X.sum()}",
    "numpy": lambda: X.numpy(),
    "an array": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "a mask that reads": lambda: X[X > 1],
    "a mask that writes": lambda: X.clone().__setitem__(X > 1, 0.0),
    "masked_select": lambda: X.masked_select(X > 1),
    "unique": lambda: X.unique(),
    "bincount": lambda: torch.bincount(COUNTS),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "repeats": lambda: torch.repeat_interleave(COUNTS, COUNTS),
}
HARMLESS: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (X + 1).sum(),
    "gathering": lambda: X[COUNTS - 1],
    "choosing": lambda: torch.where(X > 1, X, 0.0),
    "filling by a mask": lambda: X.masked_fill(X > 1, 0.0),
    "a length": lambda: len(X) + X.shape[1],
    "a new tensor": lambda: torch.tensor([1, 2]),
    "repeats of known sum": lambda: torch.repeat_interleave(COUNTS, COUNTS, output_size=3),
    "sorting": lambda: X.sort(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(AssertionError, match=r"my op waits for the device: .* in test_host_sync\.py:\d+, "):
        with torch.no_grad(), no_host_sync("my op"):
            WAITING[name]()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_wait_passes(name: str) -> None:
    with torch.inference_mode(), no_host_sync("my op"):
        HARMLESS[name]()


def test_a_module_that_may_wait_is_passed_over() -> None:
    with no_host_sync("my op", but=(__name__,)):
        assert int(X[1, 0]) == 3


def test_the_watch_ends_with_the_block() -> None:
    with no_host_sync("my op"):
        total: Tensor = X.sum()
    assert total.item() == 15
