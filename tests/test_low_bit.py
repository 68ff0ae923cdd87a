"""Moments in 8 and 4 bits: bytes measured, training close to fp32 moments, exact resume, change of width."""

import sys

import pytest
import runs
import torch
from runs import ONE, TINY

from dit import checkpoint, planner
from dit.config import UsageError, replace
from dit.low_bit import packed
from dit.planner import hardware
from dit.saving import named_tensors, state_of

pytest.importorskip("torchao")
WIDE = replace(TINY, hidden_size=128, optimizer="adamw")


def bytes_of(optimizer) -> int:
    return sum(tensor.nbytes for _, tensor in named_tensors(packed(optimizer.state_dict())["state"]))


@pytest.mark.parametrize(("optimizer", "bytes_per_parameter"),
                         [("adamw-8bit", 2 + 8 / 256), ("adamw-4bit", 1 + 8 / 128)])
def test_bytes_and_the_plan_of_them(optimizer, bytes_per_parameter):
    config = replace(WIDE, optimizer=optimizer)
    parts = runs.build(ONE, config)
    trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    large = sum(p.numel() for p in trained if p.numel() >= 4096)
    small = sum(p.numel() for p in trained) - large
    tables = sum(2 * 4 * (256 if optimizer == "adamw-8bit" else 16) + 4 for p in trained)
    measured = bytes_of(parts.optimizer)
    expected = bytes_per_parameter * large + 8 * small
    assert expected <= measured <= expected + tables
    assert measured < (0.35 if optimizer == "adamw-8bit" else 0.2) * bytes_of(runs.build(ONE, WIDE).optimizer)
    plan = planner.plan(config, hardware.find_device("A100-80GB"), 1).to_dict()["memory"]["by_category"]
    assert plan["optimizer"] == pytest.approx(measured, rel=0.1)  # the allocator rounds up to 512 bytes a tensor


def losses(optimizer):
    return [step[0] for step in runs.run(ONE, replace(TINY, optimizer=optimizer), 60).steps]


def test_losses_are_close_to_those_of_fp32_moments():
    exact, eight, four = (losses(optimizer) for optimizer in ("adamw", "adamw-8bit", "adamw-4bit"))
    assert eight[0] == exact[0] and eight != exact and eight == pytest.approx(exact, rel=0.01)
    begin, *ends = (sum(steps[where]) / 5 for steps, where in
                    ((exact, slice(5)), (exact, slice(-5, None)), (four, slice(-5, None))))
    assert ends[0] < 0.6 * begin  # there was something to learn
    assert begin - ends[1] > 0.8 * (begin - ends[0])  # 4 bits learn it a little later


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adamw-4bit"])
def test_a_resumed_run_is_the_same_run(optimizer, tmp_path):
    config = replace(WIDE, optimizer=optimizer)
    straight = runs.run(ONE, config, 4)
    parts = runs.build(ONE, config)
    runs.run(ONE, config, 2, parts=parts)
    checkpoint.save(tmp_path / "0000002.pt", state_of(config, parts, 2))
    state = checkpoint.load(tmp_path / "0000002.pt")  # weights_only: nothing of torchao's is in it
    again = runs.build(ONE, config)
    checkpoint.load_weights(again.model, state["model"], "file")
    checkpoint.load_optimizer(again.optimizer, state["opt"])
    again.ema.load_state_dict(state["ema"])
    resumed = runs.run(ONE, config, 2, parts=again, first=2)
    assert resumed.steps == straight.steps[2:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in straight.weights.items())


@pytest.mark.parametrize(("before", "after"), [
    ("adamw", "adamw-8bit"), ("adamw-8bit", "adamw"), ("adamw-4bit", "adamw"), ("adamw-8bit", "adamw-4bit")])
def test_moments_carry_over_to_another_width(before, after):
    first, second = (runs.build(ONE, replace(WIDE, optimizer=optimizer)) for optimizer in (before, after))
    held, taken = (parts.optimizer.state[parts.model.blocks[0].mlp.fc1.weight] for parts in (first, second))
    gradient = torch.randn(held["exp_avg"].shape, generator=torch.Generator().manual_seed(0))
    held["exp_avg"].copy_(gradient)
    held["exp_avg_sq"].copy_(gradient.square())
    checkpoint.load_optimizer(second.optimizer, packed(first.optimizer.state_dict()))
    for moment in ("exp_avg", "exp_avg_sq"):
        one, other = dense(held[moment]), dense(taken[moment])
        error = ((one - other).norm() / one.norm()).item()
        assert error == 0 if after == "adamw" else 0 < error < {"adamw-8bit": 0.02, "adamw-4bit": 0.25}[after]


def dense(moment):
    return moment.dequantize() if hasattr(moment, "codes") else moment


def test_a_step_with_a_bad_gradient_changes_nothing():
    config = replace(WIDE, optimizer="adamw-8bit")
    parts = runs.build(ONE, config)
    runs.run(ONE, config, 2, parts=parts)
    before = [tensor.clone() for _, tensor in named_tensors(packed(parts.optimizer.state_dict())["state"])]
    weights = [parameter.detach().clone() for parameter in parts.model.parameters()]
    stream = ({**batch, "noise": batch["noise"] * float("nan")} for batch in runs.batches(config, ONE, 2))
    result = runs.train_step(parts, stream, 1, lr=1e-3, ema_decay=0.5)
    assert result.skipped == 1
    after = [tensor for _, tensor in named_tensors(packed(parts.optimizer.state_dict())["state"])]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(weights, parts.model.parameters()))


def test_without_torchao_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UsageError, match="--optimizer adamw-8bit needs torchao; pip install torchao"):
        runs.build(ONE, replace(WIDE, optimizer="adamw-8bit"))
