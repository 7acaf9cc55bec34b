"""What an error that is kept keeps alive: nothing of the functions that it came out of, whoever has looked at them."""

import gc
import weakref

import pytest

from hookline.core.util.tracebacks import forget_locals


class Large:
    """Stands for memory."""


def failed(looks):
    """An error out of two functions with a Large each, and what becomes of these. looks: whether f_locals was read."""
    made = []

    def _inner(large):
        made.append(weakref.ref(large))
        raise ValueError("on purpose")

    def _outer():
        large = Large()
        made.append(weakref.ref(large))
        try:
            _inner(Large())
        except ValueError as error:
            raise KeyError("because of it") from error

    with pytest.raises(KeyError) as caught:
        _outer()
    for error in (caught.value, caught.value.__cause__):
        trace = error.__traceback__
        while looks and trace is not None:
            assert trace.tb_frame.f_locals is not None
            trace = trace.tb_next
    return caught.value, made


@pytest.mark.parametrize("looks", [False, True])
def test_an_error_keeps_no_variables_also_if_they_were_looked_at(looks):
    error, made = failed(looks)
    gc.collect()
    assert len(made) == 2 and all(large() is not None for large in made)
    forget_locals(error)
    gc.collect()
    assert error.__cause__ is not None and [large() for large in made] == [None, None]


def test_functions_that_still_run_keep_theirs():
    kept = Large()
    try:
        raise ValueError("on purpose")
    except ValueError as error:
        forget_locals(error)
    assert isinstance(kept, Large)
