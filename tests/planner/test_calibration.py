"""Calibration: a made-up machine is found from noisy measurements; nothing is judged on what it was fitted to."""

import dataclasses
import importlib.util
import json
import random
from pathlib import Path

import pytest

from dit.planner import calibration
from dit.planner.calibration import Calibration, Step, fit, fit_factors
from dit.planner.op_class import Work

ROOT = Path(__file__).parents[2]


def gemm(m, n, k, layout="nt"):
    size = (float(m), float(n), float(k))
    return Work(f"gemm {layout} float32", "gemm", size, 2 * m * n * k, 4 * (m * n + m * k + n * k))


def add(num_bytes, name="add"):
    return Work(f"{name} float32", "elementwise", (float(num_bytes),), 0, num_bytes)


VIEW = Work("view float32", "view", (1.0,), 0, 0)


def machine(work):
    """Seconds on a CPU of 100 GFLOP/s and 10 GB/s with 5 us per operation."""
    return 0.0 if work.cls == "view" else 5e-6 + work.flops / 1e11 + (work.bytes / 1e10 if not work.flops else 0)


def step(name, width, tokens, seed=0, slower=1.0, depth=3):
    noise = random.Random(seed)
    works = [w for _ in range(depth) for w in (gemm(tokens, 3 * width, width), VIEW, gemm(tokens, width, 3 * width),
                                               add(12 * tokens * width), add(8 * tokens * width, "gelu"))]
    phases = ["forward"] * len(works)
    seconds = [machine(w) * noise.uniform(0.98, 1.05) * slower for w in works]
    around = 3e-6 * len(works) + sum(w.bytes for w in works) / 4e10
    return Step(name, phases, works, seconds, {"forward": (sum(seconds) + around) * slower})


SIZES = ((32, 16), (64, 256), (128, 512), (256, 1024), (384, 2048), (96, 64))


def steps(**kwargs):
    return [step(f"{width} {tokens}", width, tokens, seed=index, **kwargs)
            for index, (width, tokens) in enumerate(SIZES)]


SINGLES = [(gemm(m, n, k), machine(gemm(m, n, k)))
           for m in (16, 128, 1024) for n in (32, 128, 512) for k in (32, 128, 512)]


@pytest.mark.parametrize("width, tokens", [(48, 100), (160, 700), (320, 1500)])
def test_an_unmeasured_step_is_predicted(width, tokens):
    found = fit("made up", steps(), SINGLES)
    unseen = step("unseen", width, tokens, seed=99)
    predicted = calibration.step_seconds(found, unseen.phases, unseen.works)
    assert predicted == pytest.approx(unseen.phase_seconds["forward"], rel=0.1)


def test_a_steps_residual_does_not_know_its_own_measurement():
    honest, one_wrong = steps(), steps()
    one_wrong[2] = step(one_wrong[2].name, *SIZES[2], seed=2, slower=3.0)
    name = honest[2].name
    good, bad = fit("a", honest, SINGLES), fit("b", one_wrong, SINGLES)
    # prediction / measured - 1, and the prediction is the same
    assert (1 + good.residuals[name]) / (1 + bad.residuals[name]) == pytest.approx(
        one_wrong[2].phase_seconds["forward"] / honest[2].phase_seconds["forward"], rel=1e-6)
    assert bad.residuals[name] < -0.5


def test_a_noisy_machine_gets_a_wide_interval():
    quiet = fit("quiet", steps(), SINGLES)
    busy = fit("busy", [dataclasses.replace(each, noise=0.5) for each in steps()], SINGLES)
    assert calibration.SPREAD_FLOOR <= quiet.spread < 0.3
    assert busy.spread > quiet.spread + 0.3


def test_seconds_grow_with_size_and_are_proportional_beyond_what_was_measured():
    found = fit("made up", steps(), SINGLES)
    seconds = [found.seconds(add(2**power)) for power in range(4, 34)]
    assert all(a <= b for a, b in zip(seconds, seconds[1:], strict=False)) and seconds[0] > 0
    assert seconds[-1] == pytest.approx(2 * seconds[-2], rel=1e-6)


def test_a_scalar_says_nothing_of_a_large_tensor():
    rows = {"neg float32": ((8.0, 1e-5),), "mul float32": ((1e3, 1e-5), (1e7, 1e-3))}
    found = Calibration("measured", "", rows, dict.fromkeys(rows, "elementwise"))
    assert found.seconds(add(10**7, "neg")) == pytest.approx(1e-3, rel=0.01)
    tensors = Work("_foreach_add_ float32", "optimizer", (40.0, 5e9), 0, 5 * 10**9)
    rows = {"_foreach_add_ float32": ((40.0, 160.0, 4e-5),)}
    found = Calibration("measured", "", rows, dict.fromkeys(rows, "optimizer"))
    assert 0.1 < found.seconds(tensors) < 2


def test_what_was_not_measured_falls_back_to_its_kernel_then_to_its_class():
    found = fit("made up", steps(), SINGLES)
    bf16 = Work("gelu bfloat16", "elementwise", (1e6,), 0, 10**6)
    assert found.seconds(bf16) == found.seconds(add(10**6, "gelu"))
    assert found.seconds(add(10**6, "tanh")) == pytest.approx(found.seconds(add(10**6)), rel=0.3)
    with pytest.raises(ValueError, match="no measurement like convolution"):
        Calibration("measured", "").seconds(Work("convolution general float32", "convolution", (1e9,), 10**9, 0))


def test_kept_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_CACHE", str(tmp_path))
    found = fit("made up", steps(), SINGLES, {"per_batch": 1e-4})
    assert calibration.find("Some CPU", 2) is None
    path = calibration.path_of("Some CPU", 2)
    calibration.save(found, path)
    again = calibration.find("Some CPU", 2)
    assert again == found and again.seconds(add(12345)) == found.seconds(add(12345))
    assert calibration.find("Some CPU", 1) is None and calibration.find("Other CPU", 2) is None
    for damaged in ("{", json.dumps({"format": 0}), json.dumps({"format": calibration.FORMAT, "surprise": 1})):
        path.write_text(damaged)
        assert calibration.find("Some CPU", 2) is None


def test_factors_follow_many_seconds_and_ignore_few():
    factors = fit_factors(["gemm"] * 10 + ["norm", "copy"], [3.0] * 10 + [1e-4, 0.0], [2.0] * 10 + [1e-5, 0.0])
    assert factors["gemm"] == pytest.approx(1.5, rel=0.02)
    assert 1.0 <= factors["norm"] < 1.01  # ten times slower, but for a ten-thousandth of the time
    assert "copy" not in factors
    outlier = fit_factors(["gemm"] * 11, [1.0] * 10 + [2.0], [1.0] * 10 + [0.01])
    assert outlier["gemm"] == pytest.approx(1.0, abs=0.01)


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_model_is_both_calibrated_on_and_checked():
    from dit.config import TrainConfig
    from dit.config_files import load_toml
    from dit.planner.micro_benchmarks import reference_config

    def form(config):
        shape = config.shape
        return shape.hidden_size, shape.depth, shape.num_heads, shape.num_tokens, config.memory.global_batch_size

    calibrate, check = script("calibrate"), script("check_time")
    fitted = {form(reference_config(TrainConfig(), width=w, depth=d, heads=h, tokens=t, batch=b, **changes))
              for w, d, h, t, b, changes in calibrate.FULL_STEPS}
    judged = {form(config) for config in check.cpu_configs().values()}
    judged.add(form(load_toml(str(ROOT / "configs" / "digits.toml"))))
    assert len(check.cpu_configs()) >= 20
    assert not fitted & judged
    assert not {each[0:4] for each in fitted} & {each[0:4] for each in judged}


def test_calibrating_measures_and_predicts_a_step(tmp_path, monkeypatch):
    """Three tiny steps on this machine, whatever it is doing: the fit is a number of the right size."""
    import torch

    from dit.config import TrainConfig
    from dit.planner.micro_benchmarks import Pool, gemm_call, reference_config, time_call, time_step

    configs = {f"{width}": reference_config(TrainConfig(), width=width, depth=1, heads=2, tokens=4, batch=batch)
               for width, batch in ((32, 2), (64, 8), (96, 16))}
    measured = [time_step(name, config, 3) for name, config in configs.items()]
    for each in measured:
        assert len(each.works) == len(each.seconds) == len(each.phases)
        assert set(each.phase_seconds) == {"data", "encode", "forward", "backward", "optimizer", "ema"}
        assert sum(each.seconds) < 3 * sum(each.phase_seconds.values())
    size = (64.0, 64.0, 64.0)
    seconds = time_call(gemm_call("nt", 64, 64, 64, Pool(torch.float32)), 0.002)
    found = fit("here", measured, [(Work("gemm nt float32", "gemm", size, 2 * 64**3, 0), seconds)])
    for each in measured:
        predicted = calibration.step_seconds(found, each.phases, each.works)
        assert 0.2 < predicted / sum(each.phase_seconds.values()) < 5
