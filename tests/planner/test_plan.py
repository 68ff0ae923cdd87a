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
from dit.config_files import load_toml
from dit.planner import alternatives, plan, shards_of
from dit.planner.catalogue import GIB
from dit.planner.hardware import cpu_device, custom_device, find_device

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan.py"
SMALL = dict(data="synthetic", model="custom", depth=2, hidden_size=96, num_heads=2, patch_size=2, image_size=64,
             global_batch_size=8, max_steps=100)
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
A100 = find_device("A100-SXM4-80GB")
pytestmark = pytest.mark.usefixtures("own_cache")


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


def test_what_amp_costs_is_planned_for_pixels_too():
    config = replace(load_toml(SCRIPT.parents[1] / "configs" / "tiny.toml"), ckpt=True, grad_accum=2)
    plain, amp = plan(config, A100), plan(replace(config, amp=True), A100)
    costs = amp.memory.peak_allocated_bytes > plain.memory.peak_allocated_bytes
    assert any("AMP costs" in note for note in amp.content["notes"]) == costs


@pytest.mark.parametrize("changes", [{}, dict(ema="off"), dict(ema="host", optimizer="adamw-foreach"),
                                     dict(optimizer="adamw-8bit"), dict(optimizer="adamw-4bit")])
def test_checkpoint_bytes_are_those_of_a_file(changes, tmp_path):
    import torch

    from dit import checkpoint
    from dit.codec import build_codec
    from dit.precision import resolve
    from dit.saving import state_of
    from dit.step import build_parts

    if changes.get("optimizer", "").endswith("bit"):
        pytest.importorskip("torchao")
    config, cpu = small(**changes), torch.device("cpu")
    parts = build_parts(config, cpu, build_codec("none"), resolve(config, cpu))
    checkpoint.save(tmp_path / "0000001.pt", state_of(config, parts, 1))
    planned = plan(config, A100).content["disk"]["checkpoint_bytes"]
    assert planned == pytest.approx((tmp_path / "0000001.pt").stat().st_size, rel=0.02)


@pytest.mark.parametrize("changes", [dict(keep_last=3), dict(keep_last=0), dict(keep_last=9), dict(keep_last=10),
                                     dict(keep_last=2, keep_every=30)])
def test_the_folder_has_room_for_a_new_file_beside_those_that_are_kept(changes, tmp_path):
    """Files written and deleted in the order of a real run; the most that there are at any moment."""
    from dit import checkpoint

    config, most = small(ckpt_every=10, **changes), 0
    for step in range(10, 101, 10):
        checkpoint.path_of(tmp_path, step).write_bytes(b"")
        most = max(most, len(list(tmp_path.iterdir())))
        checkpoint.prune(tmp_path, step, config.run.keep_last, config.run.keep_every)
    disk = plan(config, A100).content["disk"]
    assert disk["run_bytes"] // disk["checkpoint_bytes"] == most


# ---- alternatives ----

LARGE = dict(hidden_size=768, num_heads=12, depth=4, image_size=32, global_batch_size=2)  # weights, hardly activations
ACTIVE = dict(image_size=256, global_batch_size=512)  # the other way round


def just_enough(config: TrainConfig, num_devices: int = 1):
    """An A100 on which exactly this would fit."""
    memory = alternatives.plan_of(config, A100, num_devices)
    return dataclasses.replace(A100, memory_bytes=memory.device_used_bytes["high"] + (1 << 20))


@pytest.mark.parametrize("changes, flags, num_devices", [
    (ACTIVE, dict(amp=True), 1), (ACTIVE, dict(ckpt=True), 1), (ACTIVE, dict(amp=True, ckpt=True), 1),
    (ACTIVE | dict(amp=True, ckpt=True), dict(grad_accum=4), 1), (LARGE, dict(ema="host"), 1),
    (LARGE, dict(parallel="fsdp"), 2), (LARGE | dict(ema="off"), dict(optimizer="adamw-8bit"), 1),
    (LARGE | dict(global_batch_size=1), dict(ema="host", optimizer="adamw-8bit"), 1),
])
def test_what_would_fit_is_found_and_named(changes, flags, num_devices):
    config = small(**changes)
    device = just_enough(replace(config, **flags), num_devices)
    search = alternatives.what_would_fit(config, device, num_devices)
    assert search.asked.memory.verdict != "fits" and search.asked.missing_bytes > 0
    assert search.found.fits and search.found == search.closest
    assert search.found.memory.device_used_bytes["high"] < device.memory_bytes
    for name, value in flags.items():
        said = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        assert said in search.found.flags


def test_the_cheaper_of_two_that_fit_is_taken():
    config = small(**ACTIVE)
    device = just_enough(replace(config, amp=True))
    assert alternatives.what_would_fit(config, device, 1).found.flags == "--amp"
    on_fp16 = small(**ACTIVE, attention="efficient", amp=True, ckpt=True)  # what is on already is not advised
    found = alternatives.what_would_fit(on_fp16, just_enough(replace(on_fp16, grad_accum=2)), 1).found
    assert found.flags == "--grad-accum 2"


def test_where_one_device_is_too_small_the_number_that_is_enough_is_named():
    config = small(**LARGE | dict(depth=12, hidden_size=1536, global_batch_size=8, amp=True, ckpt=True))
    device = just_enough(replace(config, parallel="fsdp"), 8)
    search = alternatives.what_would_fit(config, device, 1)
    assert search.found is None and search.closest.missing_bytes > 0
    assert search.closest.memory.device_used_bytes["high"] < search.asked.memory.device_used_bytes["high"]
    assert search.spread.fits and search.spread.flags == "--parallel fsdp --num-devices 8"


def test_nothing_fits_and_the_closest_says_by_how_much():
    search = alternatives.what_would_fit(small(), custom_device(GIB // 4), 1)
    assert search.found is None and search.spread is None
    assert 0 < search.closest.missing_bytes < search.asked.missing_bytes


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    device = custom_device(2 * GIB)
    largest, memory = alternatives.largest_micro_batch(small(), device)
    assert largest > 1 and memory.verdict == "fits"
    one_more = plan(small(global_batch_size=largest + 1), device)
    assert one_more.memory.verdict != "fits"
    assert alternatives.largest_micro_batch(small(), custom_device(GIB // 4)) == (0, None)


def test_devices_that_compute_together_hold_no_smaller_shares():
    """Tensor parallel is planned as whole layers, so only the groups of devices share a model out."""
    config = replace(TrainConfig(), parallel="fsdp", tensor_parallel=2)
    assert shards_of(config, 8).num_devices == 4 and shards_of(config, 2) is None
    assert shards_of(replace(config, parallel="ddp"), 8) is None


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
