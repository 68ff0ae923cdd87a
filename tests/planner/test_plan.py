"""plan() and scripts/plan.py: the contract of plan.json, the command's answers and its one-line errors."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dit.config import TrainConfig, UsageError, replace
from dit.planner import alternatives, plan
from dit.planner.catalogue import GIB
from dit.planner.hardware import cpu_device, custom_device, find_device

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan.py"
SMALL = dict(data="synthetic", model="custom", depth=2, hidden_size=96, num_heads=2, patch_size=2, image_size=64,
             global_batch_size=8, max_steps=100)
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
A100 = find_device("A100-SXM4-80GB")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def small(**changes) -> TrainConfig:
    return replace(TrainConfig(), **(SMALL | changes))


def command(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False,
                          env=dict(os.environ))


def test_the_contract_of_plan_json():
    content = json.loads(json.dumps(plan(small(amp=True), A100, 2, price_per_device_hour=2.0).to_dict()))
    assert set(content) == {"schema", "config", "device", "num_devices", "calibration", "model", "memory", "time",
                            "run", "disk", "notes"}
    assert set(content["device"]) == {"name", "memory_bytes", "source"}
    assert set(content["model"]) == {"parameters", "forward_flops_per_image", "train_flops_per_image"}
    memory = content["memory"]
    assert set(memory) == {"verdict", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "peak_phase",
                           "by_category", "by_phase"}
    assert set(memory["by_category"]) == {"parameters", "gradients", "optimizer", "ema", "activations", "temporaries",
                                          "cast_copies", "vae", "batch", "other"}
    assert sum(memory["by_category"].values()) == memory["peak_allocated_bytes"]
    assert {"data", "encode", "forward", "backward", "optimizer", "ema", "save"} <= set(memory["by_phase"])
    for interval in (memory["device_used_bytes"], content["time"]["step_seconds"], content["run"]["hours"]):
        assert interval["low"] <= interval["mid"] <= interval["high"]
    assert {"step_seconds", "by_phase", "images_per_second", "mfu", "bound_by"} <= set(content["time"])
    assert content["run"]["steps"] == 100
    assert content["run"]["cost"] == pytest.approx(2 * content["run"]["hours"]["mid"] * 2.0)
    assert content["config"]["model"]["depth"] == 2


def test_a_device_without_known_speed_has_memory_and_no_time():
    content = plan(small(), custom_device(24 * GIB)).to_dict()
    assert content["memory"]["verdict"] == "fits"
    assert content["time"]["step_seconds"] == {"low": None, "mid": None, "high": None}
    assert any(note.startswith("No time") for note in content["notes"])


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="is not divisible"):
        plan(small(), A100, 3)
    with pytest.raises(UsageError, match="has no bf16"):
        plan(small(amp=True, amp_dtype="bf16"), find_device("V100"))
    with pytest.raises(UsageError, match="needs fp16 or bf16"):
        plan(small(attention="flash"), A100)
    with pytest.raises(UsageError, match="needs a GPU"):
        plan(small(attention="efficient"), cpu_device())


def test_notes_say_what_compiling_is_and_what_amp_costs():
    wide = small(compile=True, hidden_size=768, num_heads=12, depth=6, amp=True, image_size=32)
    notes = plan(wide, A100).content["notes"]
    assert any("--compile is not modelled" in note for note in notes)
    assert any("AMP costs" in note for note in notes)
    assert not any("AMP costs" in note for note in plan(small(amp=True, global_batch_size=512), A100).content["notes"])


def test_checkpoint_bytes_are_those_of_a_file(tmp_path):
    import torch

    from dit.model import build_model

    config = small()
    model = build_model(config.shape)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    average = {name: value if name == "pos_embed" else value.clone() for name, value in model.state_dict().items()}
    torch.save({"model": model.state_dict(), "ema": average, "opt": optimizer.state_dict()}, tmp_path / "file.pt")
    planned = plan(config, A100).content["disk"]["checkpoint_bytes"]
    assert planned == pytest.approx((tmp_path / "file.pt").stat().st_size, rel=0.02)


# ---- alternatives ----

def test_advice_is_the_cheapest_that_fits():
    config = small(global_batch_size=512, image_size=256)
    need = {flags: found.memory for flags, found in
            ((each.flags, each) for each in alternatives.compare_toggles(config, A100, 1))}
    between = need["--amp"].device_used_bytes["high"] + (1 << 20)
    assert between < need["fp32"].device_used_bytes["low"]
    found = alternatives.what_would_fit(config, dataclasses.replace(A100, memory_bytes=between), 1)
    assert found.flags == "--amp" and found.memory.verdict == "fits"
    assert alternatives.what_would_fit(config, custom_device(GIB // 4), 1) is None


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    device = custom_device(2 * GIB)
    largest, memory = alternatives.largest_micro_batch(small(), device)
    assert largest > 1 and memory.verdict == "fits"
    one_more = plan(small(global_batch_size=largest + 1), device)
    assert one_more.memory.verdict != "fits"
    assert alternatives.largest_micro_batch(small(), custom_device(GIB // 4)) == (0, None)


# ---- the command ----

def test_json_is_all_that_is_printed_and_the_second_time_is_fast():
    first = command(*FLAGS, "--device", "H100", "--json")
    assert first.returncode == 0, first.stderr
    start = time.perf_counter()
    second = command(*FLAGS, "--device", "H100", "--json")
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert time.perf_counter() - start < 10  # 2 s on an idle machine; the suite's is not


def test_the_table_tells_the_verdict():
    result = command(*FLAGS, "--device", "RTX 4090", "--price-per-device-hour", "0.5")
    assert result.returncode == 0, result.stderr
    for word in ("verdict", "fits", "allocated at the peak", "images per second", "cost"):
        assert word in result.stdout


def test_where_the_data_lie_need_not_be_known():
    result = command("--model", "DiT-S/8", "--data", "latents", "--device", "H100", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["config"]["data"]["data_path"] is None


def test_any_card_by_its_memory_and_a_picture(tmp_path):
    result = command(*FLAGS, "--device-memory", "24GiB", "--picture", str(tmp_path / "plan.png"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags, message", [
    (["--device", "H1000"], "--device H1000: unknown"),
    (["--num-devices", "0"], "--num-devices 0"),
    (["--device", "H100", "--num-devices", "3"], "not divisible"),
    (["--device-memory", "much"], "--device-memory much"),
    (["--depth", "-1"], "--depth"),
    (["--hidden-size", "97"], "--hidden-size 97"),
    (["--price-per-device-hour", "-2"], "--price-per-device-hour"),
    (["--no-such-flag"], "--no-such-flag"),
])
def test_mistakes_end_with_one_line_and_code_two(flags, message):
    result = command(*FLAGS, *flags)
    assert result.returncode == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1
