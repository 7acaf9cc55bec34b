"""The processors' GPU versions do what the plain ones do: under the interpreter on a CPU, and for real on a GPU."""

import os

import pytest
import torch

from hookline.core.contracts import NO_TOKEN, LogitsRows, ProcessorSpec, SamplingBatch
from hookline.plugins.samplers.penalties import Penalties
from hookline.plugins.samplers.truncation import safe_temperature, thresholds

pytestmark = pytest.mark.slow  # under the interpreter
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module", autouse=True)
def _triton():
    pytest.importorskip("triton")
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")


ASKED = [
    # top_k, top_p, min_p, temperature
    (0, 1.0, 0.0, 1.0),
    (5, 1.0, 0.0, 0.7),
    (1, 1.0, 0.0, 1.0),
    (50, 0.9, 0.0, 1.0),
    (0, 0.8, 0.0, 0.6),
    (0, 1.0, 0.1, 1.4),
    (0, 0.95, 0.01, 1.0),
    (30, 0.5, 0.05, 2.0),
    (99999, 0.3, 0.0, 1.0),
    (7, 0.9, 0.2, 0.0),
    (0, 0.999, 0.0, 3.0),
]


def asked(device=DEVICE):
    columns = list(zip(*ASKED, strict=True))
    top_k_N = torch.tensor(columns[0], device=device)
    return [top_k_N, *(torch.tensor(values, device=device) for values in columns[1:])]


def kept_by_sorting(logits_NV, top_k_N, top_p_N, min_p_N, temperature_N):
    scaled_NV = logits_NV / safe_temperature(temperature_N).unsqueeze(1)
    return scaled_NV >= thresholds(scaled_NV, top_k_N, top_p_N, min_p_N).unsqueeze(1)


def check_truncation(logits_NV):
    from hookline.plugins.samplers.truncation_triton import truncate

    top_k_N, top_p_N, min_p_N, temperature_N = asked()
    found_NV = truncate(logits_NV.clone().to(DEVICE), temperature_N, top_k_N, top_p_N, min_p_N).cpu()
    is_kept_NV = kept_by_sorting(logits_NV.double(), *asked("cpu"))
    for row, wanted in enumerate(ASKED):
        is_kept_V = found_NV[row] > -torch.inf
        assert torch.equal(found_NV[row][is_kept_V], logits_NV[row][is_kept_V]), wanted
        # Probabilities are summed in another order, which may move a threshold of top_p by a token or two in thousands.
        different = int((is_kept_V != (is_kept_NV[row] & (logits_NV[row] > -torch.inf))).sum())
        assert different <= int(is_kept_NV[row].sum()) * 1e-3, (wanted, different, int(is_kept_NV[row].sum()))


@pytest.mark.parametrize("vocab_size", [7, 1000, 9000])
def test_truncation_keeps_what_sorting_keeps(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    check_truncation(3 * torch.randn(len(ASKED), vocab_size, generator=generator))


def test_truncation_of_nearly_equal_logits_reads_the_whole_row():
    generator = torch.Generator().manual_seed(1)
    check_truncation(0.1 * torch.randn(len(ASKED), 5000, generator=generator))


def test_truncation_keeps_ties_together():
    generator = torch.Generator().manual_seed(2)
    logits_NV = torch.randint(-4, 5, (len(ASKED), 3000), generator=generator).float()
    logits_NV[:, ::7] = -0.0
    logits_NV[:, ::5] = -torch.inf
    check_truncation(logits_NV)


@pytest.mark.parametrize("top_k", [100, 600])
def test_truncation_with_a_top_k_beyond_the_number_of_groups(top_k):
    from hookline.plugins.samplers.truncation_triton import truncate

    generator = torch.Generator().manual_seed(5)
    logits_NV = torch.randn(2, 3000, generator=generator)
    asked = (torch.ones(2), torch.tensor([top_k, top_k]), torch.tensor([1.0, 0.6]), torch.zeros(2))
    found_NV = truncate(logits_NV.clone().to(DEVICE), *(one.to(DEVICE) for one in asked)).cpu()
    temperature_N, top_k_N, top_p_N, min_p_N = asked
    assert torch.equal(
        found_NV > -torch.inf, kept_by_sorting(logits_NV.double(), top_k_N, top_p_N, min_p_N, temperature_N)
    )
    assert int((found_NV[0] > -torch.inf).sum()) == top_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_logprobs"), [(50, 20), (9000, 5), (9000, 0), (4100, 1)])
def test_scores_equal_the_plain_ones(vocab_size, num_logprobs, dtype):
    from hookline.core.worker.results.scores import scored
    from hookline.plugins.samplers.scores_triton import score

    generator = torch.Generator().manual_seed(vocab_size)
    wide_NV = (3 * torch.randn(5, vocab_size + 8, generator=generator)).to(dtype)
    wide_NV[1, 7] = -torch.inf
    tokens_N = torch.tensor([0, 3, vocab_size - 1, 17, 20])
    logits_NV = wide_NV[:, :vocab_size]
    expected_NX = scored(logits_NV, tokens_N, num_logprobs)
    found_NX = score(wide_NV.to(DEVICE)[:, :vocab_size], tokens_N.to(DEVICE), num_logprobs).cpu()
    assert torch.equal(found_NX[:, 0], tokens_N)
    floats = [1, *range(2 + num_logprobs, 2 + 2 * num_logprobs)]
    found, expected = (rows[:, floats].int().view(torch.float32) for rows in (found_NX, expected_NX))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    named = logits_NV.gather(1, found_NX[:, 2 : 2 + num_logprobs])
    assert torch.equal(named, logits_NV.gather(1, expected_NX[:, 2 : 2 + num_logprobs]))  # ties may be named otherwise
    assert all(len(set(row)) == num_logprobs for row in found_NX[:, 2 : 2 + num_logprobs].tolist())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN under the interpreter
@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_a_row_without_a_token_disturbs_no_other_row_s_scores(num_logprobs):
    from hookline.core.worker.results.scores import scored
    from hookline.plugins.samplers.scores_triton import score

    logits_NV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(4))
    tokens_N = torch.tensor([5, NO_TOKEN, 4999])
    before_NX = score(logits_NV.to(DEVICE), tokens_N.clamp(min=0).to(DEVICE), num_logprobs).cpu()
    logits_NV[1] = torch.nan
    found_NX = score(logits_NV.to(DEVICE), tokens_N.to(DEVICE), num_logprobs).cpu()
    assert found_NX[1, 0] == NO_TOKEN and torch.equal(found_NX[::2], before_NX[::2])
    assert torch.equal(scored(logits_NV, tokens_N, num_logprobs)[:, 0], tokens_N)


@pytest.mark.gpu
def test_truncation_of_a_large_vocabulary():
    generator = torch.Generator().manual_seed(3)
    for scale in (0.05, 1.0, 4.0):
        check_truncation(scale * torch.randn(len(ASKED), 151_936, generator=generator))


def test_rows_with_too_many_candidates_keep_what_they_keep_with_room_for_all(monkeypatch):
    from hookline.plugins.samplers import truncation_triton

    generator = torch.Generator().manual_seed(5)
    logits_NV = torch.randn(len(ASKED), 1900, generator=generator) * torch.logspace(-2, 1.5, len(ASKED)).unsqueeze(1)
    logits_NV[:, ::9] = logits_NV[:, 4:5]
    logits_NV[:, 5::9] = -torch.inf
    top_k_N, top_p_N, min_p_N, temperature_N = asked()
    found = []
    for room in (2048, 4):
        monkeypatch.setattr(truncation_triton, "NUM_CANDIDATES", room)
        given = logits_NV.clone().to(DEVICE), temperature_N, top_k_N, top_p_N, min_p_N
        found.append(truncation_triton.truncate(*given))
    assert torch.equal(*found)
    assert (found[0] > -torch.inf).sum(1).min() < 1900


def test_truncation_of_a_row_does_not_depend_on_the_others():
    from hookline.plugins.samplers.truncation_triton import truncate

    generator = torch.Generator().manual_seed(4)
    logits_NV = 2 * torch.randn(len(ASKED), 6000, generator=generator).to(DEVICE)
    top_k_N, top_p_N, min_p_N, temperature_N = asked()
    found_NV = truncate(logits_NV.clone(), temperature_N, top_k_N, top_p_N, min_p_N)
    for row in range(0, len(ASKED), 3):
        some = slice(row, row + 1)
        alone = truncate(logits_NV[some].clone(), temperature_N[some], top_k_N[some], top_p_N[some], min_p_N[some])
        assert torch.equal(alone[0], found_NV[row])


@pytest.mark.parametrize("vocab_size", [50, 6000])
def test_penalties_equal_the_plain_ones(vocab_size):
    from hookline.plugins.samplers.penalties_triton import penalize

    generator = torch.Generator().manual_seed(0)
    num_rows, max_len = 6, 3000
    spec = ProcessorSpec(num_rows + 1, vocab_size, max_len, torch.device("cpu"))
    tokens_RL = torch.randint(0, min(vocab_size, 200), (num_rows + 1, max_len + 1), generator=generator).int()
    rows = LogitsRows(
        rows_N=torch.tensor([3, 0, 5, 1, 6]),
        columns={
            "repetition_penalty": torch.tensor([1.3, 1.0, 0.7, 1.0, 1.0]),
            "presence_penalty": torch.tensor([0.0, 1.5, -0.5, 0.0, 0.0]),
            "frequency_penalty": torch.tensor([0.25, 0.0, 2.0, -0.5, 0.0]),
        },
        sampling=SamplingBatch(torch.ones(5), torch.zeros(5), torch.tensor([2500, 7, 40, 3000, 1])),
        tokens_RL=tokens_RL,
        num_prompt_tokens_N=torch.tensor([1500, 7, 3, 1, 1]),
        max_num_tokens=max_len,
    )
    logits_NV = 3 * torch.randn(5, vocab_size, generator=generator)
    expected_NV = Penalties(spec).process(logits_NV.clone(), rows)
    moved = LogitsRows(
        rows.rows_N.to(DEVICE),
        {name: column.to(DEVICE) for name, column in rows.columns.items()},
        SamplingBatch(*(getattr(rows.sampling, name).to(DEVICE) for name in ("temperature_N", "seed_N", "position_N"))),
        tokens_RL.to(DEVICE),
        rows.num_prompt_tokens_N.to(DEVICE),
        max_len,
    )
    found_NV = penalize(logits_NV.clone().to(DEVICE), moved).cpu()
    torch.testing.assert_close(found_NV, expected_NV, rtol=1e-6, atol=1e-6)
    assert torch.equal(found_NV[4], logits_NV[4])
