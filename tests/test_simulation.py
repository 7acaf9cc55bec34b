"""Simulations beside the real engine: the same decisions step by step; the command line; the shipped cost model."""

import json
import re
import subprocess
import sys
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hookline import LLM, SamplingParams
from hookline.core.bench.driver import drive
from hookline.core.bench.files import read_recording
from hookline.core.bench.metrics import summarise
from hookline.core.bench.recorder import COUNTS, STATES
from hookline.core.bench.slo import Slo
from hookline.core.bench.step_counts import StepCounts
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.config.settings import validate
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF
from hookline.core.simulate.command import cost_model, main, predict
from hookline.core.simulate.cost import CostModel, Curve, HostCost, StepShapes, read_cost, write_cost
from hookline.core.simulate.engine import check_machine, simulated_engine
from hookline.core.simulate.executor import run_on
from hookline.core.simulate.fit import fit_cost, read_measured
from hookline.core.simulate.settings import SimulateKeys
from hookline.core.sweep.results import read_results
from tests.doc_pages import blocks

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs/reports/h200_qwen3_0_6b"
COST = CostModel(
    decode=Curve([1, 8], [0.004, 0.006]),
    prompt=Curve([1, 64], [0.005, 0.02]),
    prefill_pair_s=1e-6,
    context_token_s=1e-6,
    host=HostCost(0.001, launch_s={"decode": 0.001}),
)
ENGINE = {
    "block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 160,
}  # fmt: skip
LENGTHS = {"num_prompts": 14, "prompt_len": (4, 60), "output_len": (2, 24), "shared_prefix_len": 10}
LOADS = {
    "closed loop": WorkloadConfig(**LENGTHS),
    "open loop": WorkloadConfig(**LENGTHS, request_rate=60.0, burstiness=0.5),
    "classes": WorkloadConfig(
        **LENGTHS,
        request_rate=60.0,
        classes=(
            {"share": 2, "tags": {"tenant": "a"}, "cache_salt": "a", "deadline_s": 0.3},
            {"tags": {"tenant": "b"}, "priority": 1, "cache_salt": "b", "output_len": [2, 4]},
        ),
    ),
    "conversations": WorkloadConfig(**{**LENGTHS, "prompt_len": (4, 20)}, turns=(1, 3), think_s=(0.0, 0.1)),
}


@pytest.fixture(scope="module", params=[False, True], ids=["no overlap", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture(scope="module", params=["prefill_first", "chunked"])
def engines(request, overlap):
    """The real engine with the bundled checkpoint, which takes modelled times here, and a simulated one."""
    options = {"scheduler": request.param, "engine": {**ENGINE, "overlap": overlap}}
    host = PluginHost.load()
    with LLM(**options, device="cpu") as llm:
        run_on(llm.engine, COST)
        simulated = simulated_engine(validate(options, host), COST, host)
        yield llm.engine, simulated
        simulated.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_a_simulation_decides_what_the_real_engine_decides(name, engines):
    load = draw_load(LOADS[name], engines[0].limits.vocab_size)
    recordings = []
    for engine in engines:
        engine.pool.reset_cache()
        recordings.append(drive(engine, load))
    real, simulated = recordings
    for column in (*COUNTS, *STATES, "num_drawn"):
        np.testing.assert_array_equal(simulated.steps[column], real.steps[column], err_msg=column)
    for column in ("drawn", "chunk_request", "chunk_tokens"):
        np.testing.assert_array_equal(getattr(simulated, column), getattr(real, column), err_msg=column)
    np.testing.assert_allclose(simulated.steps["end_s"], real.steps["end_s"], atol=1e-9)
    assert summarise(real, Slo())["cached_tokens"] > 0
    assert [one.tags for one in simulated.requests] == [dict(one.options.tags or {}) for one in load.requests]
    assert summarise(simulated, Slo()).get("by_tag", {}).keys() == ({"tenant"} if name == "classes" else set())
    if name == "closed loop":
        assert real.steps["preemptions"].sum() > 0


def test_a_simulation_with_drafts_decides_what_the_real_engine_decides():
    host = PluginHost.load()
    options = {"drafter": {"name": "synthetic", "k": 4, "length": 2.6}, "engine": {**ENGINE, "overlap": True}}
    with LLM(**options, device="cpu") as llm:
        run_on(llm.engine, COST)
        load = draw_load(LOADS["open loop"], llm.engine.limits.vocab_size)
        with closing(simulated_engine(validate(options, host), COST, host)) as simulated:
            recordings = [drive(engine, load) for engine in (llm.engine, simulated)]
            assert simulated.speculation == llm.engine.speculation
            assert 1.4 < 1 + simulated.speculation.num_kept / simulated.speculation.drafted[0] < 2.8
    real, guessed = recordings
    for column in (*COUNTS, "num_drawn"):
        np.testing.assert_array_equal(guessed.steps[column], real.steps[column], err_msg=column)
    np.testing.assert_allclose(guessed.steps["end_s"], real.steps["end_s"], atol=1e-9)


def test_drafts_of_a_simulated_step_are_padded_to_the_size_of_their_graph():
    shapes = StepShapes.of(8, 512, 256, captures=True)
    assert [shapes.shape(StepCounts(decode_rows=rows)).num_tokens for rows in (3, 8, 9, 33, 127)] == [4, 8, 10, 40, 128]


@pytest.mark.slow
def test_nothing_of_a_simulation_imports_torch(tmp_path):
    code = (
        "import sys\nfrom hookline.core.simulate.command import main\n"
        "assert main(['workload=smoke', 'records=r']) == 0\n"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "simulated 8 requests" in done.stderr
    assert (tmp_path / "r/steps.npz").is_file()


@pytest.mark.slow
def test_a_result_line_is_a_benchmarks_and_says_that_it_is_simulated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["workload=poisson", "workload.num_prompts=20", "result=result.jsonl", "slo.ttft_s=1"]) == 0
    line = json.loads((tmp_path / "result.jsonl").read_text())
    assert line["device"] == "simulated NVIDIA H200"
    assert line["simulated"]["cost"] == "h200_qwen3_0_6b"
    assert line["metrics"]["goodput_s"] == line["metrics"]["requests_s"] > 0
    assert line["metrics"]["start_to_first_token_s"] is None
    assert line["num_blocks"] == read_cost(CONF / "cost_models/h200_qwen3_0_6b.json").origin["num_blocks"]
    assert "output_tok_s" in capsys.readouterr().out


@pytest.mark.parametrize("simulate", [lambda: main(["workload=poisson"]), lambda: predict(COST, {"engine": ENGINE})])
def test_a_simulation_that_breaks_off_closes_its_engine(simulate, tmp_path, monkeypatch):
    def break_off(engine, *what):
        closed = engine.close
        engine.close = lambda: (engines.append(engine), closed())
        raise ConfigError("this load cannot be run")

    engines = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hookline.core.bench.command.run_load", break_off)
    with suppress(ConfigError):
        assert simulate() == 2
    assert len(engines) == 1


@pytest.mark.slow
def test_a_simulated_sweep_has_a_line_for_each_job(tmp_path):
    command = [sys.executable, "-m", "core.simulate", "-m", "scheduler=prefill_first,chunked", "hydra.sweep.dir=sweep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    records = read_results(tmp_path / "sweep")
    assert [record["scheduler"] for record in records] == ["prefill_first", "chunked"]
    for record in records:
        assert record["simulated"] and record["status"] == "done"
        recording = read_recording(tmp_path / "sweep" / record["folder"])
        assert len(recording.steps["end_s"]) == record["metrics"]["steps"]


@pytest.mark.slow
def test_given_coefficients_need_sizes_and_are_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cost = "cost={decode:{tokens:[1],seconds:[0.5]},prompt:{tokens:[1],seconds:[1.0]}}"
    load = ["workload.num_prompts=1", "workload.output_len=[5,5]", "engine.num_blocks=100"]
    assert main([cost]) == 2
    assert "engine.block_size and engine.num_blocks must be set: the cost model does not say" in capsys.readouterr().err
    assert main([cost, "engine.block_size=16"]) == 2
    assert "error: engine.num_blocks must be set: the cost model does not say" in capsys.readouterr().err
    assert main([cost, *load, "engine.block_size=16", "result=result.jsonl", "host_s=0.25"]) == 0
    assert json.loads((tmp_path / "result.jsonl").read_text())["metrics"]["seconds"] == 1.25 + 4 * 0.75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost=h200_qwen3"], "no cost model named cost=h200_qwen3. Did you mean 'h200_qwen3_0_6b'?"),
        (["model=qwen3_8b"], "model=Qwen/Qwen3-8B: the cost model was not measured with it but with Qwen/Qwen3-0.6B"),
        (["kernels=torch"], "kernels=torch: the cost model was not measured with it"),
        (["dtype=float32"], "dtype=float32: the cost model was not measured with it but with auto"),
        (["dtype=bfloat16"], "but with auto, and does not say what auto was there; leave dtype out"),
        (["device=cpu"], "device=cpu: the cost model was not measured with it but with auto, which was cuda; leave"),
        (
            ["sampler=greedy"],
            "sampler=greedy (sampler.greedy=True): the cost model was not measured with it but with sampler=gumbel "
            "(sampler.greedy=False); leave sampler out",
        ),
        (["engine.cuda_graphs=false"], "engine.cuda_graphs=False: the cost model was not measured with it"),
        (["profile=trace.json"], "profile has no effect in a simulation"),
        (["save=cost.txt"], "save=cost.txt: the name must end in .json"),
        (["save=folder/cost.json"], "save=folder/cost.json: the folder folder does not exist; make it first"),
        (["host_s=fast"], "host_s='fast' must be a finite number of seconds, at least 0, or null"),
        (["host_s=-1"], "error: host_s=-1 must be a finite number of seconds, at least 0, or null"),
        (["workload.think_s=null"], "error: workload.think_s must have a value; it is None"),
        (["cost={decode:{tokens:[1],seconds:[1]}}"], "error: cost is no cost model: prompt needs tokens and seconds; "),
        (["cost={decode:{tokens:[1]}}"], "error: cost is no cost model: decode needs tokens and seconds; docs/simul"),
        (["cost={decode:{tokens:[1],seconds:[1],x:1}}"], "no cost model: got an unexpected keyword argument 'x'; docs"),
        (["fit=nowhere"], "fit=nowhere holds no finished benchmark"),
        (["fit=nowhere", "cost=other"], "give cost or fit, not both"),
        (
            ["drafter=suffix"],
            "drafter=suffix: a simulation has no text that drafts could be right about; take ",
        ),
        (["sampling.temperature=0.1"], "sampling has no effect in a benchmark"),
    ],
)
def test_what_a_simulation_cannot_use_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_cost_model_of_the_page_runs_as_the_page_says(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/simulation.md"
    [cost] = [block.body for block in blocks(page) if block.language == "json"]
    [command] = re.findall(r"`hookline simulate (.* cost=mine.json .*)`", page.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(cost)
    assert main(command.split()) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["model=qwen3_0_6b", "kernels=triton", "device=cuda"])
def test_naming_what_was_measured_changes_nothing(argument, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([argument]) == 0


def test_cost_models_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_cost(COST, tmp_path / "mine.json")
    assert cost_model({"cost": "~/mine.json", "save": "~/copy.json"}) == read_cost(tmp_path / "copy.json")
    with pytest.raises(ConfigError, match=f"fit={tmp_path}/records holds no finished benchmark"):
        cost_model({"cost": SimulateKeys.cost, "fit": "~/records"})


CPU = {"device": "cpu, 2 threads", "kernels": "torch", "config": {"dtype": "auto", "device": "auto", "engine": {}}}


@pytest.mark.parametrize(
    ("origin", "asked", "message"),
    [
        (CPU, {"device": "cpu", "dtype": "float32"}, None),
        (CPU, {"dtype": "bfloat16"}, "dtype=bfloat16: .* with it but with auto, which was float32; leave dtype out"),
        (CPU, {"device": "cuda"}, "device=cuda: .* with it but with auto, which was cpu; leave device out"),
        (
            {**CPU, "config": {"dtype": "bfloat16"}},
            {"dtype": "float32"},
            "dtype=float32: .* not measured with it but with bfloat16; leave dtype out",
        ),
        ({}, {"dtype": "float32"}, "dtype=float32: the cost model does not say what it was measured with; leave dtype"),
    ],
)
def test_what_auto_was_on_the_measured_machine_may_be_named(origin, asked, message):
    host = PluginHost.load()
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_machine(asked, validate(asked, host), replace(COST, origin=origin), host)


def test_the_shipped_model_is_the_fit_of_the_recorded_sweep():
    shipped, fitted = read_cost(CONF / "cost_models/h200_qwen3_0_6b.json"), fit_cost(read_measured(REPORT))
    assert fitted.decode.seconds == pytest.approx(shipped.decode.seconds, rel=1e-3)
    assert fitted.prompt.seconds == pytest.approx(shipped.prompt.seconds, rel=1e-3)
    assert fitted.context_token_s == pytest.approx(shipped.context_token_s, rel=1e-3)
    assert fitted.host.launch_s == pytest.approx(shipped.host.launch_s, rel=1e-3)
    assert fitted.origin["range"] == shipped.origin["range"]


@pytest.mark.slow
def test_a_fit_says_on_which_steps_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([f"fit={REPORT}", "workload.num_prompts=1"]) == 0
    err = capsys.readouterr().err
    stands = r"is based on 14873 decode steps of 1 to \d+ rows and 642 steps with prompts of \d+ to 16384 tokens"
    assert re.search(stands, err) and "guess" not in err


@pytest.mark.slow
def test_a_simulation_far_beyond_what_was_measured_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    curve = {"tokens": [1], "seconds": [0.5]}
    measured = {"decode": {"steps": 9, "least": 1, "most": 2}, "prompt": {"steps": 7, "least": 3, "most": 15}}
    cost = {"decode": curve, "prompt": curve, "origin": {"block_size": 16, "num_blocks": 100, "range": measured}}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    load = ["cost=cost.json", "workload.num_prompts=4", "workload.output_len=[5,5]"]
    assert main([*load, "workload.prompt_len=[10,10]"]) == 0
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("hookline: ") and "guess" in line
    ]
    assert len(warnings) == 1 and "simulated steps with prompts of up to 40 tokens; the cost model was" in warnings[0]
    assert main([*load, "workload.prompt_len=[7,7]"]) == 0
    assert "guess" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("job", [3, 4, 9])
def test_the_shipped_model_predicts_the_jobs_it_was_fitted_to(job):
    result = next(one for one in read_results(REPORT) if one["job"] == job)
    guess = predict(read_cost(CONF / "cost_models/h200_qwen3_0_6b.json"), result["config"], result["num_blocks"])
    assert guess["output_tok_s"] == pytest.approx(result["metrics"]["output_tok_s"], rel=0.05)
    assert guess["ttft_s"]["p50"] == pytest.approx(result["metrics"]["ttft_s"]["p50"], rel=0.25)


@pytest.mark.parametrize(
    ("measured", "stated", "joined"), [(128, {}, 8), (0, {}, 0), (128, {"joined_decodes": 4}, 4), (3, {}, 3)]
)
def test_decodes_join_prompts_where_they_did_on_the_machine_that_was_measured(measured, stated, joined):
    host = PluginHost.load()
    cost = replace(COST, captures=True, captured_joined_decodes=measured)
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 256, "block_size": 16}
    engine_config = {**sizes, "num_blocks": 400, **stated}
    with closing(simulated_engine(validate({"engine": engine_config}, host), cost, host)) as engine:
        assert engine.limits.plan.joining.max_decodes == joined
        mixed = []
        for index in range(9):
            engine.add([1 + index] * 30, SamplingParams(max_tokens=12, seed=1))
            engine.step()
            mixed.append(bool(engine.last_stats.num_prefill_tokens and engine.last_stats.num_decode_tokens))
        assert mixed == [False, *(0 < index <= joined for index in range(1, 9))]


def test_a_simulation_has_the_groups_of_layers_that_were_measured():
    host = PluginHost.load()
    cost = replace(COST, origin={"cache_groups": {"windows": [None, 8, 8], "has_states": False}})
    with closing(simulated_engine(validate({"engine": ENGINE}, host), cost, host)) as engine:
        assert engine.groups.windows == (None, 8, 8)
        assert engine.limits.plan.max_blocks_per_token == 3
        for index in range(6):
            engine.add([1 + index] * 30, SamplingParams(max_tokens=12))
        held = []
        while engine.has_work:
            engine.step()
            held.append(40 - engine.pool.num_free)
        # 42 tokens are 11 blocks of four; of each window, three at most are held between steps.
        assert engine.pool.num_free == 40 and max(held) > 17
