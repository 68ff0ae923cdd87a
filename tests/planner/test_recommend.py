"""Advice: every row is planned to fit, limits hold, the choice is not beaten in its table, bad wishes are refused."""

import dataclasses
import importlib.util
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dit.cli import train_config
from dit.config import TrainConfig, UsageError, replace
from dit.planner import flops, memory_of, plan, recommend, traced
from dit.planner.calibration import PRIORS
from dit.planner.candidates import kernels
from dit.planner.hardware import find_device
from dit.planner.recommend import Costs, Wish, broken, pareto
from dit.planner.step_time import predict_time
from dit.planner.tables import advice_rows, changes

ROOT = Path(__file__).parents[2]
NAMES = ("RTX-4090", "A100-SXM4-80GB", "H100-SXM")
DEVICES = [find_device(name) for name in NAMES]
CONFIG = replace(TrainConfig(), model="custom", hidden_size=512, depth=2, num_heads=8, patch_size=2, data="synthetic",
                 global_batch_size=256)
COSTS = Costs()


def advise(config=CONFIG, devices=DEVICES, **wish):
    return recommend.recommend(config, devices, Wish(**{"steps": 400_000} | wish), costs=COSTS)


def test_every_row_fits_and_the_choice_is_one_of_them_and_is_not_beaten():
    advice = advise(goal="cost")
    assert advice.holds and advice.relax is None and len(advice.rows) > 1
    assert any(row is advice.choice for row in advice.rows)
    for row in advice.rows:
        step = traced(row.config, row.device, row.micro_batch).at(row.micro_batch)
        assert memory_of(row.config, row.device, row.num_devices, step).verdict == "fits"
        assert row.micro_batch * row.config.memory.grad_accum * row.num_devices == 256
        assert row.cost[0] >= advice.choice.cost[0]
    assert all(a.hours[0] <= b.hours[0] for a, b in zip(advice.rows, advice.rows[1:], strict=False))
    assert advise(goal="quick").choice.hours[0] == min(row.hours[0] for row in advise(goal="quick").rows)
    assert advise(goal="quick").choice.hours[0] <= advice.choice.hours[0]
    header, *lines = advice_rows(advice)
    assert [line[0] for line in lines].count("*") == 1 and all(len(line) == len(header) for line in lines)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["cost", "quick"]), st.one_of(st.none(), st.floats(0.5, 100)),
       st.one_of(st.none(), st.floats(1, 300)), st.integers(1, 8),
       st.lists(st.sampled_from(range(len(NAMES))), min_size=1, max_size=2, unique=True))
def test_limits_hold_or_it_is_said_which_to_relax(goal, max_hours, max_cost, max_devices, chosen):
    wish = Wish(goal=goal, steps=400_000, max_hours=max_hours, max_cost=max_cost, max_devices=max_devices)
    advice = recommend.recommend(CONFIG, [DEVICES[index] for index in chosen], wish, costs=COSTS)
    assert all(row.num_devices <= max_devices for row in advice.rows)
    if advice.holds:
        for row in advice.rows:
            assert not broken(row, wish)
            assert max_hours is None or row.hours[1] <= max_hours
            assert max_cost is None or row.cost[1] <= max_cost
    else:
        assert broken(advice.choice, wish) and "--max-" in advice.relax


def test_the_relaxed_limit_is_then_kept():
    tight = advise(goal="cost", max_hours=0.01)
    assert not tight.holds and "--max-hours" in tight.relax
    assert tight.reasons[0].startswith("the nearest to the limits, which nothing keeps: ")
    assert advise(goal="cost", max_hours=tight.choice.hours[1] * 1.001).holds


def test_quality_takes_the_largest_model_that_finishes(monkeypatch):
    presets = {"small": dict(depth=1, hidden_size=384, patch_size=2, num_heads=6),
               "large": dict(depth=1, hidden_size=1024, patch_size=2, num_heads=16)}
    monkeypatch.setattr(recommend, "PRESETS", presets)
    monkeypatch.setattr("dit.config.PRESETS", presets)
    config = replace(TrainConfig(), model="small", data="synthetic", global_batch_size=64, amp=True)
    device = [find_device("A100-SXM4-80GB")]
    hours = {name: advise(replace(config, model=name), device, goal="quick", max_devices=1).choice.hours[1]
             for name in presets}
    assert hours["small"] < hours["large"]
    between = advise(config, device, goal="quality", max_devices=1, max_hours=sum(hours.values()) / 2)
    assert between.holds and between.choice.config.model.model == "small"
    enough = advise(config, device, goal="quality", max_devices=1, max_hours=hours["large"] * 1.01)
    assert enough.choice.config.model.model == "large"


def test_what_was_asked_for_stays():
    config = replace(CONFIG, amp=True, amp_dtype="fp16", optimizer="adamw-foreach", ema="off")
    choice = advise(replace(config, depth=1), DEVICES[1:2]).choice.config
    assert (choice.precision.amp, choice.precision.amp_dtype) == (True, "fp16")
    assert (choice.optim, choice.data, choice.memory.global_batch_size) == (config.optim, config.data, 256)
    assert choice.shape == replace(config, depth=1).shape


def parsed(line):
    """The settings of a line to paste, by train.py's own parser."""
    start, flags = line.split("train.py ", 1)
    assert start.startswith(("python ", "torchrun --n"))
    return train_config(shlex.split(flags), prog="train.py")


def test_the_line_to_paste_says_the_same_run():
    row = advise(goal="quick").choice
    some = replace(row.config, ckpt=True, ckpt_blocks=1, grad_accum=2, amp=True, tf32=False, image_size=(256, 128))
    line = dataclasses.replace(row, config=some, num_devices=8).torchrun
    assert line.startswith("torchrun --nproc_per_node=8 train.py ")
    assert parsed(line) == some
    assert dataclasses.replace(row, num_devices=1).torchrun.startswith("python train.py")
    many = dataclasses.replace(row, device=DEVICES[1], num_devices=32)
    assert many.torchrun.startswith("torchrun --nnodes=4 --nproc_per_node=8 train.py")


@pytest.mark.parametrize("goal", ["cost", "quick"])
@pytest.mark.parametrize("max_devices", [1, 16])
def test_every_line_is_one_that_train_py_takes(goal, max_devices):
    for row in advise(goal=goal, max_devices=max_devices).rows:
        assert parsed(row.torchrun) == row.config
        assert row.config.micro_batch(row.num_devices) == row.micro_batch


# ---- ways to fit ----

WIDE = replace(CONFIG, hidden_size=1024, depth=2, num_heads=16, global_batch_size=32, amp=True)


def card(of_state, config=WIDE):
    """An A100 whose memory is ``of_state`` times the weights, gradients, moments and average, and what is around."""
    around = DEVICES[1].context_bytes[2] + 2 * DEVICES[1].cublas_workspace_bytes
    state = 20 * flops.trainable_parameters(config.shape)
    return dataclasses.replace(DEVICES[1], memory_bytes=int(around + of_state * state))


def test_what_frees_memory_at_a_price_is_not_taken_where_the_plain_run_fits():
    for goal in ("cost", "quick"):
        for row in advise(WIDE, [DEVICES[1]], goal=goal).rows:
            assert changes(WIDE, row.config) == ""


def test_fsdp_is_taken_where_a_whole_model_does_not_fit():
    wide = replace(WIDE, hidden_size=2048, num_heads=32, global_batch_size=8)
    room = int(1.2e9)  # NCCL and its like
    small = dataclasses.replace(card(0.8, wide), memory_bytes=card(0.8, wide).memory_bytes + room)
    advice = advise(wide, [small], goal="cost", max_devices=8)
    assert {row.config.memory.parallel for row in advice.rows} == {"fsdp"}
    assert all(row.num_devices > 1 and row.memory.verdict == "fits" for row in advice.rows)
    assert any("--parallel fsdp" in reason for reason in advice.reasons)
    assert "--parallel fsdp" in advice.choice.torchrun
    asked = advise(replace(wide, parallel="fsdp"), [DEVICES[1]], max_devices=2)
    assert {row.config.memory.parallel for row in asked.rows} == {"fsdp"}, "what was asked for stays"


def test_the_average_goes_to_the_host_and_then_moments_to_eight_bits_where_nothing_else_fits():
    def optim(of_state):
        advice = advise(WIDE, [card(of_state)], max_devices=1)
        assert parsed(advice.choice.torchrun) == advice.choice.config
        assert any("another optimizer" in reason for reason in advice.reasons) == ("bit" in changes(
            WIDE, advice.choice.config))
        return advice.choice.config.optim.ema, advice.choice.config.optim.optimizer

    # of 20 bytes a weight the average is 4 and moments are 8; a few images come on top
    assert [optim(of_state / 20) for of_state in (17, 20, 24, 30)] == [
        ("host", "adamw-8bit"), ("device", "adamw-8bit"), ("host", "adamw"), ("device", "adamw")]
    with pytest.raises(UsageError, match="fits on none of"):
        advise(WIDE, [card(0.3)], max_devices=1)


# ---- attention ----

def test_only_kernels_that_are_faster_somewhere_are_tried():
    h100, a100 = DEVICES[2], DEVICES[1]
    large = replace(CONFIG, amp=True, image_size=512, depth=1)  # 1024 tokens
    assert kernels(large, h100) == ["auto", "cudnn"]
    assert kernels(replace(large, image_size=256), h100) == ["auto"], "as fast as flash at 256 tokens"
    assert kernels(large, a100) == kernels(replace(large, amp=False), h100) == ["auto"]
    assert kernels(large, find_device("T4")) == ["auto"]
    assert kernels(replace(large, attention="efficient"), h100) == ["efficient"], "what was asked for stays"
    choice = advise(replace(large, global_batch_size=64), [h100], max_devices=1).choice
    assert choice.config.precision.attention == "cudnn" and "--attention cudnn" in choice.torchrun


# ---- images ----

IMAGES = replace(CONFIG, data="folder", global_batch_size=32, num_classes=10, amp=True, depth=1)


def test_latents_are_proposed_where_making_them_pays():
    asked = replace(IMAGES, data_path="photos", augment="resize", classes_file="classes.txt")
    long = advise(asked, [DEVICES[1]], max_devices=1, steps=400_000, num_samples=50_000)
    assert long.choice.config.data.data == "latents"
    assert long.choice.extraction.startswith("python scripts/extract_latents.py --data-path photos --vae ema ")
    assert "--augment resize --classes-file classes.txt" in long.choice.extraction
    assert "--data latents --data-path latents" in long.choice.torchrun
    assert any("encoding the 50,000 images once" in reason for reason in long.reasons)
    # as many hours as training on latents and encoding, one after the other
    alone = long.choice.step_seconds * 400_000 / 3600
    assert long.choice.hours[0] == pytest.approx(alone + long.choice.extraction_hours)
    short = advise(IMAGES, [DEVICES[1]], max_devices=1, steps=1_000, num_samples=50_000)
    assert short.choice.config.data.data == "folder" and short.choice.extraction is None
    assert " --data-path PATH " in short.choice.torchrun and parsed(short.choice.torchrun).data.data_path == "PATH"


def test_the_line_that_makes_latents_is_one_the_script_takes():
    spec = importlib.util.spec_from_file_location("extract_latents", ROOT / "scripts" / "extract_latents.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    asked = replace(IMAGES, image_size=(256, 128), num_classes=0)
    choice = advise(asked, [DEVICES[1]], max_devices=1, goal="quick", num_samples=1_000).choice
    assert choice.extraction.startswith("python scripts/")
    choice = dataclasses.replace(choice, num_devices=2)
    start, flags = choice.extraction.split("scripts/extract_latents.py ")
    assert start == "torchrun --nproc_per_node=2 "
    said = script.parse(shlex.split(flags))
    assert said.image_size == [256, 128] and said.vae == "ema" and said.num_classes == 0
    assert said.output == choice.config.data.data_path


def test_the_vae_in_the_loop_costs_what_the_whole_plan_says():
    micro_batch = 32
    for changes_ in ({}, {"ckpt": True}, {"amp": True, "grad_accum": 2, "global_batch_size": 64}):
        config = replace(IMAGES, **changes_)
        quick = COSTS.time(config, DEVICES[1], 1, micro_batch, PRIORS)
        whole = predict_time(traced(config, DEVICES[1], micro_batch).at(micro_batch), config, DEVICES[1], 1)
        assert quick.step_seconds["mid"] == pytest.approx(whole.step_seconds["mid"], rel=0.01)
        quick_bytes = COSTS.memory_bytes(config, DEVICES[1], 1, micro_batch)
        planned = COSTS.plan_memory(config, DEVICES[1], 1, micro_batch)
        assert quick_bytes == pytest.approx(planned.device_used_bytes["high"], rel=0.3)


# ---- costs ----

@pytest.mark.parametrize("changes", [{}, {"grad_accum": 2}, {"grad_accum": 8, "amp": True}, {"ckpt": True}])
def test_counted_costs_are_those_of_the_whole_plan(changes):
    config = replace(CONFIG, **changes)
    micro_batch = config.micro_batch(1)
    whole = predict_time(traced(config, DEVICES[1], micro_batch).at(micro_batch), config, DEVICES[1], 1)
    quick = Costs().time(config, DEVICES[1], 1, micro_batch, PRIORS)
    assert quick.step_seconds["mid"] == pytest.approx(whole.step_seconds["mid"], rel=1e-9)
    assert quick.by_phase == pytest.approx(whole.by_phase)
    content = plan(config, DEVICES[1]).to_dict()
    assert content["time"]["step_seconds"]["mid"] == pytest.approx(whole.step_seconds["mid"])


def test_a_thousand_candidates_take_seconds_once_traces_exist():
    devices = [*DEVICES, *map(find_device, ("H200", "L40S", "A10"))]
    advise(devices=devices, max_devices=1)
    costs = Costs()
    start = time.process_time()
    wish = Wish(goal="cost", steps=400_000, max_devices=64)
    advice = recommend.recommend(CONFIG, devices, wish, costs=costs)
    seconds = time.process_time() - start
    print(f"{advice.num_candidates} candidates in {seconds:.1f} s of CPU from {costs.num_traces} traces")
    assert advice.num_candidates >= 1000 and costs.num_traces <= 16
    assert seconds < 5


def test_the_front_keeps_what_nothing_beats():
    row = advise(goal="quick").choice

    def at(hours, cost, memory):
        return dataclasses.replace(row, hours=(hours, hours), cost=(cost, cost), memory_bytes=memory)

    rows = [at(1, 5, 5), at(2, 4, 5), at(3, 4, 4), at(4, 5, 5), at(2, 5, 6)]
    assert pareto(rows) == [rows[0], rows[1], rows[2]]


@pytest.mark.parametrize("wish, said", [({"goal": "speed"}, "--goal speed: unknown; one of quality, quick, cost"),
                                        ({"max_hours": 0.0}, "--max-hours 0.0: must be above 0"),
                                        ({"max_cost": -1.0}, "--max-cost -1.0: must be above 0"),
                                        ({"max_devices": 0}, "--max-devices 0: must be above 0"),
                                        ({"max_devices": 4096}, "--max-devices 4096: at most 1024"),
                                        ({"num_samples": 0}, "--num-samples 0: must be above 0"),
                                        ({"prices": {"X": float("nan")}}, "--price-per-device-hour nan for X")])
def test_wishes_that_cannot_be_are_refused(wish, said):
    with pytest.raises(UsageError) as error:
        advise(**wish)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_fits_nowhere_is_said_to():
    huge = replace(CONFIG, hidden_size=8192, num_heads=64)
    with pytest.raises(UsageError, match="fits on none of: Tesla T4"):
        advise(huge, [find_device("T4")], max_devices=1)
