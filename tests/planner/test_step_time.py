"""Step time: what the trace says is what a timer sees, plans move the right way, and public runs come out right."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from dit.config import PRESETS, ModelShape, TrainConfig, replace
from dit.planner import flops, traced
from dit.planner.calibration import Calibration
from dit.planner.hardware import cpu_device, custom_device, find_device
from dit.planner.op_class import CLASSES, works
from dit.planner.priors import filled, rates
from dit.planner.public_runs import public_runs
from dit.planner.step_time import predict_time, run_plan
from dit.planner.trace import StepTrace

A100 = find_device("A100-SXM4-80GB")
ROOT = Path(__file__).parents[2]


def small(**changes):
    return replace(TrainConfig(), **{"model": "custom", "data": "synthetic", "vae": "none", "image_size": 16,
                                     "patch_size": 2, "num_classes": 10, "hidden_size": 128, "depth": 2,
                                     "num_heads": 4, "global_batch_size": 32} | changes)


def large(**changes):
    return small(**{"hidden_size": 1152, "num_heads": 16, "image_size": 32, "global_batch_size": 64} | changes)


TRACES = {}


def trace(config, device=A100, num_devices=1):
    micro_batch = config.micro_batch(num_devices)
    key = (config, device.has_bf16, device.generation == "cpu", micro_batch)
    if key not in TRACES:
        TRACES[key] = traced(config, device, micro_batch).at(micro_batch)
    return TRACES[key]


def plan(config, device=A100, num_devices=1, **kwargs):
    return predict_time(trace(config, device, num_devices), config, device, num_devices, **kwargs)


# ---- the operations ----

TOGGLES = [{}, {"attention": "math"}, {"ckpt": True, "ckpt_blocks": 1}, {"grad_accum": 2},
           {"amp": True, "amp_dtype": "bf16"}, {"optimizer": "adamw-foreach", "clip_grad": 1.0}]
EXACT = {"gemm", "batched gemm", "convolution", "norm", "attention forward", "attention backward"}


@pytest.mark.parametrize("changes", TOGGLES, ids=str)
def test_the_trace_holds_the_work_that_a_timer_sees(changes):
    from dit.planner.micro_benchmarks import time_step

    config = small(global_batch_size=4, hidden_size=64, image_size=8, **changes)
    timed = time_step("", config, 1)

    def kernels(phases, each):
        return [(phase, work) for phase, work in zip(phases, each, strict=True)
                if work.cls != "view" and phase in ("forward", "backward", "optimizer", "ema")]

    ops = trace(config, cpu_device()).ops
    planned = kernels([op.phase for op in ops], works(ops))
    seen = kernels(timed.phases, timed.works)
    assert sum(work.flops for _, work in planned) == sum(work.flops for _, work in seen)
    for cls in CLASSES:
        ours = sorted(f"{phase} {work.key} {work.size}" for phase, work in planned if work.cls == cls)
        theirs = sorted(f"{phase} {work.key} {work.size}" for phase, work in seen if work.cls == cls)
        different = set(ours) ^ set(theirs)
        assert len(different) <= (0 if cls in EXACT else 6), different


@pytest.mark.parametrize("name", ["DiT-S/2", "DiT-B/4", "DiT-L/8"])
@pytest.mark.parametrize("ckpt", [False, True])
def test_flops_of_the_trace_are_the_closed_form(name, ckpt):
    config = replace(TrainConfig(), model=name, data="synthetic", ckpt=ckpt, global_batch_size=2, attention="flash")
    shape = ModelShape(input_size=(32, 32), in_channels=4, **PRESETS[name])
    counted = sum(work.flops for work in works(trace(config, cpu_device()).ops))
    assert counted == 2 * flops.executed_train_flops_per_image(shape, shape.depth if ckpt else 0, fused_attention=True)


def test_layouts_are_told_apart():
    keys = [work.key for work in works(trace(small()).ops) if work.cls == "gemm"]
    forward, inputs, weights = (keys.count(f"gemm {layout} float32") for layout in ("nt", "nn", "tn"))
    assert forward == weights == 2 * 5 + 4 and inputs == forward - 1  # the timestep's features need no gradient


# ---- a GPU, from priors ----

def test_the_parts_sum_to_the_whole():
    planned = plan(large(amp=True), num_devices=1)
    span = planned.step_seconds
    assert sum(planned.by_phase.values()) == pytest.approx(span["mid"])
    assert span["low"] < span["mid"] < span["high"]
    assert planned.images_per_second == pytest.approx(64 / span["mid"])
    expected = flops.train_flops_per_image(large().shape) * 64 / span["mid"] / 312e12
    assert planned.mfu == pytest.approx(expected) and 0.05 < planned.mfu < 0.8
    assert planned.calibration["kind"] == "prior"
    assert set(planned.by_class) <= set(CLASSES)


def test_plans_move_the_right_way():
    base = plan(large()).step_seconds["mid"]
    assert plan(large(tf32=False)).step_seconds["mid"] > 2 * base
    assert plan(large(amp=True)).step_seconds["mid"] < base
    assert 1.15 * base < plan(large(ckpt=True)).step_seconds["mid"] < 1.4 * base
    assert plan(large(amp=True, attention="math")).step_seconds["mid"] > plan(large(amp=True)).step_seconds["mid"]
    assert 1.8 * base < plan(large(global_batch_size=128)).step_seconds["mid"] < 2.2 * base
    accumulated = plan(large(global_batch_size=128, grad_accum=2))
    assert 1.8 * base < accumulated.step_seconds["mid"] < 2.2 * base
    for slower, faster in (("RTX-3090", "RTX-4090"), ("A100-SXM4-40GB", "A100-SXM4-80GB"), ("A100", "H100"),
                           ("L4", "A10"), ("H100-PCIe", "H100"), ("H100", "B200")):
        times = [plan(large(amp=True), find_device(name)).step_seconds["mid"] for name in (slower, faster)]
        assert times[0] > times[1], (slower, faster)


def test_what_bounds_a_step_is_named():
    assert plan(large(tf32=False)).bound_by == "compute"
    assert plan(small(global_batch_size=2), find_device("H100")).bound_by == "dispatch"
    assert plan(large(), data_seconds=100.0).bound_by == "data loading"
    assert plan(large(amp=True, attention="math", image_size=64, global_batch_size=8)).bound_by == "memory bandwidth"
    assert plan(large(amp=True, global_batch_size=128), find_device("RTX-4090"), 64).bound_by == "communication"


def test_slow_data_adds_what_the_step_cannot_hide():
    config = large(num_workers=4)
    alone = plan(config, data_seconds=0.0).step_seconds["mid"]
    assert plan(config, data_seconds=2 * alone).step_seconds["mid"] == pytest.approx(alone, rel=1e-6)
    assert plan(config, data_seconds=40 * alone).step_seconds["mid"] == pytest.approx(10 * alone, rel=1e-3)
    waits = plan(replace(config, num_workers=0), data_seconds=1.0)
    assert waits.step_seconds["mid"] == pytest.approx(alone + 1.0) and waits.by_phase["data"] >= 1.0


def test_tiles_and_waves():
    assert filled(1, 128 * 108, 128, 1024, 108) == 1.0  # one full wave
    just_over = filled(1, 128 * 109, 128, 1024, 108)
    assert just_over < 0.99
    assert filled(1, 8, 1152, 1152, 108) < 0.2  # one image's modulation leaves most of the device idle
    assert filled(1, 1152, 1152, 64 * 1024, 108) > 0.85  # a long inner dimension is split
    assert all(0 < filled(b, m, n, k, 132) <= 1
               for b in (1, 64) for m in (1, 100, 5000) for n in (3, 129) for k in (8, 4096))


def test_devices_without_known_peaks_are_said_to_be_unknown():
    with pytest.raises(ValueError, match="no peaks are known"):
        plan(small(), custom_device(24 << 30))
    with pytest.raises(ValueError, match="has not been measured; run scripts/calibrate.py"):
        plan(small(), cpu_device())
    assert rates(A100, tf32=True).tf32 and not rates(find_device("V100"), tf32=True).tf32


def test_factors_of_a_measured_gpu_scale_its_classes():
    prior = plan(large())
    twice = plan(large(), calibration=Calibration("measured", "here", factors=dict.fromkeys(CLASSES, 2.0), spread=0.05))
    assert twice.step_seconds["mid"] == pytest.approx(2 * prior.step_seconds["mid"], rel=1e-3)
    assert twice.step_seconds["high"] / twice.step_seconds["mid"] == pytest.approx(math.exp(0.05))
    assert twice.calibration == {"kind": "measured", "source": "here"}


def _public():
    return {run.id: run for run in public_runs(ROOT / "tests" / "data" / "public.csv")}


@pytest.mark.parametrize("name", ["FD-L1", "FD-L2", "FD-L3", "FD-L4", "FD-L5"])
def test_public_runs_on_an_a100_come_out_within_15_percent(name):
    """From a trace of one and of two blocks: the rest are alike, and the device's seconds add up."""
    run = _public()[name]
    sizes = {"model": "custom", "hidden_size": 1152, "num_heads": 16, "patch_size": 2}
    first, second = (plan(replace(run.config, depth=depth, **sizes)) for depth in (1, 2))
    seconds = {key: first.step_seconds[key] + 27 * (second.step_seconds[key] - first.step_seconds[key])
               for key in ("low", "mid", "high")}
    assert seconds["mid"] == pytest.approx(run.step_seconds, rel=0.15)
    assert seconds["low"] < run.step_seconds < seconds["high"]


# ---- several devices ----

def test_fsdp_shares_the_optimizer_and_exchanges_more_than_ddp():
    ddp, fsdp = large(amp=True, global_batch_size=512), large(amp=True, global_batch_size=512, parallel="fsdp")
    one, whole, shared = plan(ddp, A100, 8), plan(ddp, A100, 8), plan(fsdp, A100, 8)
    assert shared.communication_seconds > whole.communication_seconds
    assert shared.by_phase["optimizer"] < 0.2 * whole.by_phase["optimizer"]
    assert shared.by_phase["forward"] > one.by_phase["forward"]
    assert sum(shared.by_phase.values()) == pytest.approx(shared.step_seconds["mid"])
    halves = plan(replace(fsdp, shard_size=4), A100, 8)
    assert whole.by_phase["optimizer"] > halves.by_phase["optimizer"] > shared.by_phase["optimizer"]
    slow = find_device("RTX-4090")
    ratio = [plan(config, device, 8).step_seconds["mid"] for device in (slow, A100) for config in (fsdp, ddp)]
    assert ratio[0] / ratio[1] > ratio[2] / ratio[3], "over PCIe fsdp costs more than over NVLink"


def test_fsdp_on_one_device_is_ddp_on_one_device():
    one, other = plan(large(amp=True)), plan(large(amp=True, parallel="fsdp"))
    assert one.step_seconds == other.step_seconds and other.communication_seconds == 0


def test_what_is_not_modelled_is_said():
    notes = " ".join(plan(large(amp=True, tensor_parallel=2), A100, 2).notes)
    assert "--tensor-parallel 2 is not modelled" in notes and "time" in notes
    assert not plan(large(amp=True)).notes
    many = " ".join(plan(large(amp=True, global_batch_size=128), A100, 16).notes)
    assert "2 hgx-a100 nodes of 8 devices" in many and "InfiniBand between" in many
    assert plan(large(amp=True, tensor_parallel=2), A100, 2).images_per_second == pytest.approx(
        64 / plan(large(amp=True, tensor_parallel=2), A100, 2).step_seconds["mid"])


def test_compile_is_told_to_be_an_upper_bound_of_memory_and_time():
    from dit.planner import plan as whole

    notes = " ".join(whole(large(compile=True), A100).to_dict()["notes"])
    assert "--compile is not modelled" in notes and "time" in notes and "upper bound" in notes


@pytest.mark.parametrize("changes", [{}, {"parallel": "fsdp"}, {"parallel": "fsdp", "amp": True, "shard_size": 2}])
def test_sums_over_operations_are_the_plan(changes):
    from dit.planner.calibration import PRIORS
    from dit.planner.communication import shard_size
    from dit.planner.step_time import predict_tallied, tally_of

    config = large(global_batch_size=256, grad_accum=4, **changes)
    ops = trace(config, A100, 4).ops
    counted = [(op, work, 1) for op, work in zip(ops, works(ops), strict=True)]
    shards = shard_size(config, 4)
    first = tally_of([each for each in counted if each[0].micro_step == 0 or each[0].phase in ("optimizer", "ema")],
                     config, A100, PRIORS, shards)
    rest = tally_of([each for each in counted if each[0].micro_step == 1 and each[0].phase not in ("optimizer", "ema")],
                    config, A100, PRIORS, shards)
    assert rest.device, "the trace repeats its second micro-step"
    whole = tally_of(counted, config, A100, PRIORS, shards)
    assert first.plus(rest).device == pytest.approx(whole.device)
    assert predict_tallied(whole, 16, config, A100, 4).step_seconds == plan(config, A100, 4).step_seconds


# ---- the whole run, and the promise of no torch ----

def test_hours_cost_and_energy():
    planned = plan(large(amp=True))
    run = run_plan(planned, 400_000, 8, A100, price_per_device_hour=1.5)
    hours = planned.step_seconds["mid"] * 400_000 / 3600
    assert run.hours["mid"] == pytest.approx(hours) and run.device_hours == pytest.approx(8 * hours)
    assert run.cost == pytest.approx(12 * hours) and run.energy_kwh == pytest.approx(8 * hours * 0.4)
    assert run_plan(planned, 10, 1, custom_device(24 << 30)).cost is None
    assert run_plan(planned, 10, 1, custom_device(24 << 30)).energy_kwh is None


def test_a_cpu_is_planned_from_its_calibration():
    config = small()
    measured = {
        "add float32": ("elementwise", ((1e3, 1e-6), (1e9, 1.0))),
        "gemm nt float32": ("gemm", ((100.0, 100.0, 100.0, 2e-5),)),
        "bmm float32": ("batched gemm", ((8.0, 16.0, 16.0, 32.0, 1e-5),)),
        "_fused_adamw float32": ("optimizer", ((100.0, 1e6, 1e-3),)),
        "_fused_sgd float32": ("ema", ((100.0, 1e6, 1e-3),)),
        "convolution patches float32": ("convolution", ((1e6, 1e-4),))}
    found = Calibration("measured", "made up", {key: rows for key, (_, rows) in measured.items()},
                        {key: cls for key, (cls, _) in measured.items()}, per_op={"forward": 1e-3}, spread=0.1)
    planned = plan(replace(config, attention="math"), cpu_device(), calibration=found, data_seconds=0.5)
    assert isinstance(trace(config, cpu_device()), StepTrace)
    forward = sum(op.phase == "forward" for op in trace(replace(config, attention="math"), cpu_device()).ops)
    assert planned.by_phase["forward"] > forward * 1e-3
    assert planned.by_class["overhead"] == pytest.approx(forward * 1e-3)
    assert planned.mfu is None and planned.calibration["kind"] == "measured"
    assert all(type(value) is float for value in [*planned.by_phase.values(), *planned.by_class.values()])


def test_planning_time_needs_no_torch():
    code = ("import sys; import dit.planner.step_time, dit.planner.communication, dit.planner.calibration, "
            "dit.planner.public_runs; assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
