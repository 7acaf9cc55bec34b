"""What rank 0 says of a step comes back as it was, whatever is in it."""

import numpy as np
import pytest

from hookline.core.errors import RankError, RequestFault, StepCapacityError, StepFault
from hookline.core.executor.answers import (
    FAULT,
    LAUNCHED,
    RESULT,
    fault,
    launched,
    read_fault,
    read_result,
    read_words,
    result,
    words_of,
)
from hookline.core.step.executor import StepResult, read_by, tapped_after
from hookline.core.step.timing import DeviceTime


def words(frame):
    """A frame without its length, which is checked."""
    found = np.frombuffer(frame, dtype=np.int64)
    assert found[0] == len(found) - 1
    return found[1:]


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 8), (0, 4)])
def test_tokens_and_scored_rows_come_back_in_their_shape(shape):
    tokens = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    frame = words(result(7, StepResult(tokens), None))
    assert frame[:2].tolist() == [RESULT, 7]
    found, time = read_result(frame)
    assert found.tokens.shape == shape and (found.tokens == tokens).all()
    assert found.extras == found.apart == {} and time is None


def test_vectors_states_and_times_come_beside_the_tokens():
    apart = {
        read_by(0): np.array([[0.5, 1.5, 2.5]], np.float32),
        read_by(2): np.zeros((1, 0), np.float32),
        tapped_after(3): np.ones((2, 3), np.float32),
        tapped_after(11): np.zeros((1, 3), np.float32),
    }
    sent = StepResult(np.array([4]), apart=apart)
    found, time = read_result(words(result(1, sent, DeviceTime(0.25, 1e-6, on_host=True))))
    assert {name: one.tolist() for name, one in found.apart.items()} == {
        name: one.tolist() for name, one in apart.items()
    }
    assert not found.extras
    assert time == DeviceTime(0.25, 1e-6, on_host=True)


def test_extras_come_back_by_name_in_their_shape_and_dtype():
    extras = {
        "lens.top": np.arange(6, dtype=np.int32).reshape(2, 3),
        "ä": np.array([True, False, True]),
        "none": np.zeros((0, 4), np.float16),
        "one": np.array(1.5),
    }
    found, _ = read_result(words(result(1, StepResult(np.array([4]), extras, {"x": np.ones(1)}), None)))
    assert list(found.extras) == list(extras)
    for name, extra in extras.items():
        assert found.extras[name].dtype == extra.dtype and found.extras[name].shape == extra.shape
        assert (found.extras[name] == extra).all()


def test_the_time_of_extensions_comes_back():
    seconds_X2 = np.array([[0.0, 0.25], [3.0, 1e-6]])
    sent = StepResult(np.array([4]), extras={"sums": np.array([2.0])}, extension_seconds=seconds_X2)
    found, time = read_result(words(result(1, sent, DeviceTime(0.25, 1e-6))))
    assert (found.extension_seconds == seconds_X2).all() and found.extras["sums"] == [2.0]
    assert time == DeviceTime(0.25, 1e-6)


def test_a_step_that_was_taken_is_said_in_three_words():
    assert words(launched(5)).tolist() == [LAUNCHED, 5]


@pytest.mark.parametrize("kind", [StepFault, StepCapacityError])
def test_a_lost_step_comes_back_as_the_error_it_was(kind):
    frame = words(fault(9, kind("sampler 'x' fails: ä")))
    assert frame[:2].tolist() == [FAULT, 9]
    found = read_fault(frame)
    assert type(found) is kind and str(found) == "sampler 'x' fails: ä"


def test_a_fault_of_single_requests_brings_whose_it_is():
    found = read_fault(words(fault(9, RequestFault("processor 'x' fails", rows=[4, 2], extensions=6))))
    assert type(found) is RequestFault and found.rows == {2, 4} and found.extensions == 6 and not found.is_refusal
    refusal = read_fault(words(fault(9, RequestFault("pooler 'x' fails", rows=[4], is_refusal=True))))
    assert isinstance(refusal, RequestFault) and refusal.is_refusal


def test_an_error_of_a_kind_that_nobody_knows_is_a_rank_s():
    class Odd(StepFault):
        pass

    assert type(read_fault(words(fault(1, Odd("odd"))))) is RankError


def test_plain_data_travels_as_words():
    told = {"host": "10.0.0.3", "port": 7}
    assert read_words(words_of(told)) == told and read_words(words_of({})) == {}
