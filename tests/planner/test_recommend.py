"""Advice: every row is planned to fit, limits hold, the choice is not beaten in its table, bad wishes are refused."""

import dataclasses
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dit.config import TrainConfig, UsageError, replace
from dit.planner import memory_of, plan, recommend, traced
from dit.planner.calibration import PRIORS
from dit.planner.hardware import find_device
from dit.planner.recommend import Costs, Wish, broken, pareto, rows_for_people
from dit.planner.step_time import predict_time

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
    header, *lines = rows_for_people(advice)
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
    assert advise(goal="cost", max_hours=tight.choice.hours[1] * 1.001).holds


def test_quality_takes_the_largest_model_that_finishes(monkeypatch):
    presets = {"small": dict(depth=1, hidden_size=384, patch_size=2, num_heads=6),
               "large": dict(depth=1, hidden_size=1024, patch_size=2, num_heads=16)}
    monkeypatch.setattr(recommend, "PRESETS", presets)
    monkeypatch.setattr("dit.config.PRESETS", presets)
    config = replace(TrainConfig(), model="small", data="synthetic", global_batch_size=64)
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


def test_the_line_to_paste_says_the_same_run():
    from dit.cli import train_config

    row = advise(goal="quick").choice
    some = replace(row.config, ckpt=True, ckpt_blocks=1, grad_accum=2, amp=True, tf32=False, image_size=(256, 128))
    line = dataclasses.replace(row, config=some, num_devices=8).torchrun
    start, flags = line.split(" train.py ")
    assert start == "torchrun --nproc_per_node=8"
    assert train_config(flags.split(), prog="train.py") == some
    assert dataclasses.replace(row, num_devices=1).torchrun.startswith("python train.py")
    many = dataclasses.replace(row, device=DEVICES[1], num_devices=32)
    assert many.torchrun.startswith("torchrun --nnodes=4 --nproc_per_node=8 train.py")


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
    devices = [*DEVICES, *map(find_device, ("H200", "L40S", "A10", "B200", "RTX-5090", "A100-PCIe"))]
    advise(devices=devices, max_devices=1)
    start = time.process_time()
    advice = advise(devices=devices, max_devices=64)
    assert advice.num_candidates > 800
    assert time.process_time() - start < 30  # seconds of CPU, on a machine that may be busy; about five when it is not


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
                                        ({"prices": {"X": float("nan")}}, "--price-per-device-hour nan for X")])
def test_wishes_that_cannot_be_are_refused(wish, said):
    with pytest.raises(UsageError) as error:
        advise(**wish)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_fits_nowhere_is_said_to():
    huge = replace(CONFIG, hidden_size=8192, num_heads=64)
    with pytest.raises(UsageError, match="fits on none of: Tesla T4"):
        advise(huge, [find_device("T4")])
