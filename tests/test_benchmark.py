"""The benchmark: its contenders do the same work, ratios come from inside the rounds, --json prints nothing else."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from dit import cli
from dit.config import UsageError
from dit.parallel import Ranks

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py"
TINY = ["--config", str(SCRIPT.parents[1] / "configs" / "tiny.toml")]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["benchmark"]


def contenders_of(benchmark, tmp_path, *flags):
    config = benchmark.configure([*TINY, *flags])
    contenders, metered, _ = benchmark.build_contenders(config, Ranks(0, 0, 1, torch.device("cpu")), tmp_path)
    return {each.name: each for each in contenders}, metered


@pytest.mark.parametrize("flags", [(), ("--grad-accum", "2", "--clip-grad", "0.05"), ("--ckpt",)],
                         ids=["plain", "accumulation and clipping", "checkpointing"])
def test_this_projects_step_and_the_plain_loop_do_the_same_work_with_the_same_model(benchmark, tmp_path, flags):
    contenders, metered = contenders_of(benchmark, tmp_path, *flags)
    contenders[benchmark.METERED].turn(6)
    written = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    plain = contenders[benchmark.PLAIN_OURS].turn.__self__
    plain.turn(6)
    assert written == pytest.approx(plain.losses, rel=1e-4)
    assert len(set(written)) == 6 and metered.metered_steps == 6


def test_both_averages_end_at_the_same_weights(benchmark, tmp_path):
    contenders, metered = contenders_of(benchmark, tmp_path)
    metered.bare_turn(4)
    plain = contenders[benchmark.PLAIN_OURS].turn.__self__
    plain.turn(4)
    ours = metered._step.args[0]
    for name, average in plain._average.named_parameters():
        if name in ours.ema.averages:
            torch.testing.assert_close(ours.ema.averages[name], average, rtol=1e-4, atol=1e-6)
    moved = (plain.model.state_dict()["final_layer.linear.weight"]).abs().max()
    assert moved > 1e-4  # it starts at zero: without training the comparison above would be empty


def test_diffusers_model_has_an_embedder_more_per_block(benchmark, tmp_path):
    contenders, _ = contenders_of(benchmark, tmp_path)
    plain = contenders[benchmark.PLAIN_DIFFUSERS].turn.__self__
    first = plain.model.state_dict()["proj_out_2.weight"].clone()
    plain.turn(3)
    assert len(set(plain.losses)) == 3 and all(0 < loss < 10 for loss in plain.losses)
    assert not torch.equal(first, plain.model.state_dict()["proj_out_2.weight"])
    ours = contenders[benchmark.OURS].parameters
    width, classes, tokens = 64, 11, 16
    embedder = 256 * width + width + width * width + width + classes * width
    assert contenders[benchmark.PLAIN_DIFFUSERS].parameters == ours + embedder - tokens * width  # two blocks; a buffer


def test_a_slower_contender_shows_as_a_ratio_inside_the_rounds(benchmark):
    names = (benchmark.OURS, benchmark.PLAIN_OURS, benchmark.PLAIN_DIFFUSERS, benchmark.METERED, benchmark.WATCHED)
    naps = dict(zip(names, (0.004, 0.006, 0.012, 0.004, 0.012), strict=True))
    contenders = [benchmark.Contender(name, 1, lambda steps, nap=nap: time.sleep(steps * nap))
                  for name, nap in naps.items()]
    steps, rounds = benchmark.measure(contenders, benchmark.MeasureConfig(rounds=4, seconds=0.4))
    assert 2 <= steps <= 3 and len(rounds) == 4 and all(set(times) == set(names) for times in rounds)
    ratios = benchmark.summarise(contenders, rounds, 16)["comparisons"]
    assert ratios["loop"]["median"] == pytest.approx(1.5, abs=0.3)
    assert ratios["whole"]["median"] == pytest.approx(3, abs=0.5)
    assert ratios["model"]["median"] == pytest.approx(2, abs=0.4)


def test_measuring_ends_in_time_on_a_machine_that_became_slower(benchmark):
    calls = iter(range(10**6))
    contender = benchmark.Contender("it", 1, lambda steps: time.sleep(0.2 if next(calls) > 3 else 0.001))
    start = time.monotonic()
    _, rounds = benchmark.measure([contender], benchmark.MeasureConfig(rounds=100, seconds=0.6))
    assert 3 <= len(rounds) < 10 and time.monotonic() - start < 5


def test_the_processors_clock_does_not_count_waiting(benchmark):
    contender = benchmark.Contender("it", 1, lambda steps: time.sleep(0.02 * steps))
    for clock, at_least, below in (("wall", 0.02, 9), ("processor", 0, 0.01)):
        config = benchmark.MeasureConfig(rounds=3, seconds=0.1, clock=clock)
        assert all(at_least <= times["it"] < below for times in benchmark.measure([contender], config)[1])


def test_shares_of_instruments_follow_from_the_rounds(benchmark):
    times = {benchmark.OURS: 2.0, benchmark.METERED: 2.1, benchmark.WATCHED: 4.1}
    costs = benchmark.instrument_costs([times] * 3, host_seconds=0.01, log_every=50)
    assert costs["metrics"]["median"] == pytest.approx(0.05)
    assert costs["metrics_host"] == pytest.approx(0.005)
    assert costs["watch_in_a_watched_step"]["high"] == pytest.approx(1.0)
    assert costs["watch"]["low"] == pytest.approx(0.02)


def test_quartiles(benchmark):
    assert benchmark.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"low": 2.0, "median": 3.0, "high": 4.0}


def test_json_is_all_that_stands_on_stdout(benchmark, capsys, monkeypatch):
    monkeypatch.setattr(cli.sys, "argv", ["scripts/benchmark.py"])
    assert benchmark.main([*TINY, "--rounds", "3", "--seconds", "0.5", "--json"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out)
    assert out.count("\n") == 1
    assert [each["name"] for each in result["contenders"]] == [
        benchmark.OURS, benchmark.PLAIN_OURS, benchmark.PLAIN_DIFFUSERS, benchmark.METERED, benchmark.WATCHED]
    assert result["contenders"][0]["time_ratio"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert torch.__version__.startswith(result["environment"]["versions"]["torch"])
    assert result["rounds"] == 3 and result["precision"] == "fp32"
    text = benchmark.table(result)
    assert f"{result['comparisons']['whole']['median']:.3f} [" in text and "memory watch" in text


def test_without_model_and_config_it_is_the_digits_and_with_a_model_synthetic(benchmark):
    assert benchmark.configure([]).data.data == "digits"
    config = benchmark.configure(["--model", "DiT-S/8", "--global-batch-size", "4"])
    assert (config.data.data, config.model.model) == ("synthetic", "DiT-S/8")


@pytest.mark.parametrize("flags, message", [
    (["--rounds", "2"], "--rounds 2: quartiles need at least 3"),
    (["--seconds", "0"], "--seconds 0.0: must be a number above 0"),
    (["--model", "DiT-S/2", "--image-size", "128", "256"], "diffusers' model is square; give one number"),
    ([*TINY, "--ckpt", "--ckpt-blocks", "1"], "--ckpt-blocks 1: diffusers' model checkpoints all blocks or none"),
    ([*TINY, "--grad-accum", "5"], "--global-batch-size 16 is not divisible by"),
])
def test_mistakes_are_one_line(benchmark, flags, message):
    with pytest.raises(UsageError) as caught:
        benchmark.configure(flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_several_processes_are_refused(benchmark, monkeypatch):
    from contextlib import contextmanager

    @contextmanager
    def two():
        yield Ranks(0, 0, 2, torch.device("cpu"))

    monkeypatch.setattr(benchmark, "processes", two)
    with pytest.raises(UsageError, match="measures one device: start it with python"):
        benchmark.benchmark(benchmark.configure(TINY))
