"""Preflight: every colour of every item, the rule which reds stop a run, and two ranks that compare notes."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dit import preflight, preflight_checks
from dit.cli import settle
from dit.config import TrainConfig, UsageError, replace
from dit.config_files import load_toml
from dit.data import PositionDataset, SyntheticData
from dit.parallel import Ranks
from dit.preflight_checks import Check
from dit.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
RANKS = Ranks(0, 0, 1, torch.device("cpu"))
GIB = 2**30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def config():
    return replace(settle(load_toml(ROOT / "configs" / "digits.toml")), num_workers=1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return RunFolder(tmp_path)


def plan_of(verdict="fits", used=0.5 * GIB, step=0.1, parameters=1_868_552, devices=1, file_bytes=2**20,
            run_bytes=2**22):
    return {"model": {"parameters": parameters}, "num_devices": devices, "device": {"memory_bytes": 80 * GIB},
            "memory": {"verdict": verdict, "device_used_bytes": {"low": 0.9 * used, "mid": used, "high": 1.1 * used}},
            "time": {"step_seconds": {"mid": step}},
            "disk": {"checkpoint_bytes": file_bytes, "run_bytes": run_bytes}}


def test_a_digits_run_is_green_within_seconds(config, folder):
    start = time.process_time()
    checks = preflight.preflight(config, folder, RANKS, plan_of())
    assert time.process_time() - start < 3
    assert [check.name for check in checks] == ["model", "memory", "device memory", "precision", "data",
                                                "shared memory", "disk", "collectives"]
    assert {check.colour for check in checks} == {"green"}, list(map(str, checks))
    assert not any(check.advice for check in checks)
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints"]
    said = []
    preflight.show(checks, said.append)
    assert len(said) == 8 and said[0].startswith("preflight  green  model          custom, 1,868,552 parameters")
    assert preflight.as_dicts(checks)[4]["figures"]["seconds_per_sample"] > 0


# ---- the rule, and how a check fails ----

def test_which_reds_stop_a_run(config):
    reds = [Check(name, "red", "found", "do this") for name in ("memory", "device memory", "data")]
    ambers = [Check("disk", "amber", "found", "do this")]
    assert [check.name for check in preflight.stopping(ambers + reds, config)] == ["data"]
    require = replace(config, plan="require")
    assert [check.name for check in preflight.stopping(reds, require)] == ["memory", "device memory", "data"]
    preflight.stop(ambers + reds[:2], config)
    with pytest.raises(UsageError, match="^preflight: data: found; do this$"):
        preflight.stop(ambers + reds, config)


def test_a_check_that_breaks_is_amber_and_a_mistake_of_the_users_is_red():
    def break_down():
        raise KeyError("surprise")

    def find_mistake():
        raise UsageError("--data-path x: not a folder")

    broken = preflight_checks.guarded("disk", break_down)
    assert (broken.colour, broken.found) == ("amber", "could not be checked (KeyError: 'surprise')")
    assert preflight_checks.guarded("data", find_mistake) == Check("data", "red", "--data-path x: not a folder")


def test_a_plan_of_an_unknown_form_breaks_nothing(config, folder):
    checks = preflight.preflight(config, folder, RANKS, {"schema": 99})
    assert {check.name: check.colour for check in checks}["memory"] == "amber"
    assert "red" not in {check.colour for check in checks}


def test_quiet_says_only_what_is_not_green():
    said = []
    preflight.show([Check("a", "green", "well"), Check("b", "amber", "odd", "mend it")], said.append, quiet=True)
    assert said == ["preflight  amber  b              odd; mend it", "preflight  1 of 2 checks green"]


# ---- plan and memory ----

def test_a_plan_of_another_model_or_number_of_devices_is_amber(config):
    assert preflight_checks.check_model(config, RANKS, {}).colour == "green"
    other = preflight_checks.check_model(config, RANKS, plan_of(parameters=7))
    assert other.colour == "amber" and "the plan is of 7 parameters on 1 devices" in other.found
    assert preflight_checks.check_model(config, RANKS, plan_of(devices=8)).colour == "amber"


@pytest.mark.parametrize("verdict, colour", [("fits", "green"), ("tight", "amber"), ("does_not_fit", "red")])
def test_memory_repeats_the_plans_verdict(verdict, colour):
    check = preflight_checks.check_memory(plan_of(verdict))
    assert check.colour == colour and "512.0 MiB planned" in check.found and "of 80.00 GiB" in check.found
    assert (check.advice == "") == (colour == "green")


def test_without_a_plan_memory_is_amber():
    check = preflight_checks.check_memory({})
    assert check.colour == "amber" and "--plan off" in check.advice


def test_device_memory_on_a_cpu_is_what_the_machine_has_left(monkeypatch):
    monkeypatch.setattr(preflight_checks, "_host_available_bytes", lambda: 4.0 * GIB)
    monkeypatch.setattr(preflight_checks, "device_used_bytes", lambda device: GIB)
    assert preflight_checks.check_device_memory(RANKS, plan_of(used=4.9 * GIB)).colour == "green"
    check = preflight_checks.check_device_memory(RANKS, plan_of(used=5.1 * GIB))
    assert check.colour == "red" and "4.00 GiB of host memory free; the plan needs 5.10 GiB" in check.found
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert preflight_checks.check_device_memory(RANKS, plan_of(used=4.9 * GIB)).colour == "red"
    assert preflight_checks.check_device_memory(RANKS, plan_of(used=2.9 * GIB)).colour == "green"


def test_device_memory_on_a_gpu_names_what_others_hold(monkeypatch):
    gpu = Ranks(0, 0, 1, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(preflight_checks, "device_used_bytes", lambda device: 50 * GIB)
    monkeypatch.setattr(preflight_checks, "_gpu_others", lambda device, used: (used - GIB, " (process 123)"))
    full = preflight_checks.check_device_memory(gpu, plan_of(used=40 * GIB))
    assert full.colour == "red" and "49.00 GiB taken by others (process 123); the plan needs 40.00 GiB" in full.found
    assert "end the other processes" in full.advice
    room = preflight_checks.check_device_memory(gpu, plan_of(used=20 * GIB))
    assert room.colour == "amber" and "(process 123)" in room.found
    monkeypatch.setattr(preflight_checks, "_gpu_others", lambda device, used: (0.0, ""))
    assert preflight_checks.check_device_memory(gpu, plan_of(used=20 * GIB)).colour == "green"


def test_what_others_hold_is_estimated_without_the_drivers_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    assert preflight_checks._gpu_others(torch.device("cuda", 0), 10 * GIB) == (7 * GIB, "")
    assert preflight_checks._gpu_others(torch.device("cuda", 0), 2 * GIB) == (0, "")


# ---- precision ----

def test_precision_that_cannot_be_had_is_red_and_slow_is_amber(config, monkeypatch):
    red = preflight_checks.guarded("precision", lambda: preflight_checks.check_precision(
        replace(config, attention="cudnn"), RANKS.device))
    assert red.colour == "red" and "--attention cudnn needs a GPU" in red.found
    amp = replace(config, amp=True)
    monkeypatch.setattr(preflight_checks, "_matrix_product",
                        lambda config, device, precision: (1.0 if precision.dtype is None else 3.0, True))
    slow = preflight_checks.check_precision(amp, RANKS.device)
    assert slow.colour == "amber" and "bf16" in slow.found and "3.0 times as long as in fp32" in slow.found
    monkeypatch.setattr(preflight_checks, "_matrix_product", lambda *_: (1.0, True))
    assert preflight_checks.check_precision(amp, RANKS.device).colour == "green"
    monkeypatch.setattr(preflight_checks, "_matrix_product", lambda *_: (1.0, False))
    assert preflight_checks.check_precision(amp, RANKS.device).colour == "red"


@pytest.mark.parametrize("amp", [False, True])
def test_the_matrix_product_is_timed_in_the_asked_precision(config, amp):
    from dit.precision import resolve

    precision = resolve(replace(config, amp=amp), RANKS.device)
    seconds, is_finite = preflight_checks._matrix_product(config, RANKS.device, precision)
    assert 0 < seconds < 1 and is_finite is True


# ---- data ----

class SlowData(SyntheticData):
    def read(self, indices, scalars, posterior_noise=None):
        time.sleep(0.02 * len(indices))
        return super().read(indices, scalars)


def dataset_of(source):
    return PositionDataset(source, seed=0, noise_shape=source.sample_shape)


@pytest.mark.parametrize("workers, step, colour, advice", [
    (1, 100.0, "green", ""),  # 128 images in 100 s: slow reading is fast enough
    (1, 3.0, "amber", "--num-workers 2"),  # 43/s wanted
    (0, 100.0, "green", ""), (0, 10.0, "amber", "--num-workers 1"), (None, None, "green", ""),
    (4, 0.1, "amber", "cores are not enough: encode once with scripts/extract_latents.py"),
])
def test_reading_is_held_against_the_planned_step(config, monkeypatch, workers, step, colour, advice):
    monkeypatch.setattr(preflight_checks, "_reading_rate", lambda dataset, rank: (40.0, 40, {}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = replace(config, num_workers=1 if workers is None else workers)
    check = preflight_checks.check_data(config, RANKS, plan_of(step=step) if step else {},
                                        dataset_of(SyntheticData((1, 8, 8))))
    assert check.colour == colour and advice in check.advice and "40 read, 40 samples/s" in check.found


def test_the_reading_rate_is_measured_and_slow_data_is_not_waited_for(monkeypatch):
    rate, count, _ = preflight_checks._reading_rate(dataset_of(SlowData((1, 8, 8))), 0)
    assert 0 < rate <= 50 and 1 <= count < 100
    monkeypatch.setattr(preflight_checks, "DATA_SECONDS", 60)
    _, count, unreadable = preflight_checks._reading_rate(dataset_of(SyntheticData((1, 8, 8))), 3)
    assert preflight_checks.DATA_SAMPLES <= count < 2 * preflight_checks.DATA_SAMPLES and unreadable == {}


def test_unreadable_images_are_amber_and_a_folder_of_them_red(tmp_path):
    root = tmp_path / "images"
    (root / "cat").mkdir(parents=True)
    for index in range(6):
        Image.fromarray(np.full((16, 16, 3), 40 * index, dtype=np.uint8)).save(root / "cat" / f"{index}.png")
    config = replace(TrainConfig(), data="folder", data_path=str(root), vae="none", image_size=16, model="DiT-S/2")
    assert preflight_checks.check_data(config, RANKS, {}).colour == "green"
    (root / "cat" / "2.png").write_bytes(b"not a picture")
    check = preflight_checks.check_data(config, RANKS, {})
    assert check.colour == "amber" and "1 of them unreadable" in check.found and "2.png" in check.found
    for path in (root / "cat").iterdir():
        path.write_bytes(b"not a picture")
    red = preflight_checks.guarded("data", lambda: preflight_checks.check_data(config, RANKS, {}))
    assert red.colour == "red" and "cannot be read" in red.found
    missing = replace(config, data_path=str(tmp_path / "nowhere"))
    red = preflight_checks.guarded("data", lambda: preflight_checks.check_data(missing, RANKS, {}))
    assert red.colour == "red" and "not a folder" in red.found


@pytest.mark.parametrize("free, colour", [(0.9, "red"), (1.2, "amber"), (1.6, "green")])
def test_shared_memory_must_hold_the_micro_batches_under_way(config, monkeypatch, free, colour):
    needed = 5 * 128 * 4 * (64 + 64)  # two of each of two processes and one in use; image and noise
    monkeypatch.setattr(preflight_checks.shutil, "disk_usage", lambda path: Usage(0, 0, int(free * needed)))
    check = preflight_checks.check_shared_memory(replace(config, num_workers=2), RANKS)
    assert check.colour == colour and ("--shm-size" in check.advice) == (colour != "green")
    assert preflight_checks.check_shared_memory(replace(config, num_workers=0), RANKS).colour == "green"


# ---- disk ----

@pytest.mark.parametrize("free, colour", [(499, "red"), (501, "amber"), (601, "green")])
def test_free_disk_is_held_against_the_planned_files(config, folder, monkeypatch, free, colour):
    monkeypatch.setattr(preflight_checks.shutil, "disk_usage", lambda path: Usage(0, 0, free))
    plan = plan_of(file_bytes=100, run_bytes=500)  # four files that stay, and one while it replaces the oldest
    check = preflight_checks.check_disk(config, folder, plan)
    assert check.colour == colour and ("--keep-last" in check.advice) == (colour != "green")
    assert preflight_checks.check_disk(config, folder, plan, writes=False).colour == "green"


def test_files_that_are_there_already_need_no_room(config, folder, monkeypatch):
    monkeypatch.setattr(preflight_checks.shutil, "disk_usage", lambda path: Usage(0, 0, 250))
    plan = plan_of(file_bytes=100, run_bytes=500)
    assert preflight_checks.check_disk(config, folder, plan).colour == "red"
    for step in (1, 2, 3):
        (folder.checkpoints / f"{step:07d}.pt").write_bytes(b"x" * 100)
    assert preflight_checks.check_disk(config, folder, plan).colour == "green"


def test_saving_that_takes_long_beside_training_is_amber(config, folder, monkeypatch):
    monkeypatch.setattr(preflight_checks, "_writing_rate", lambda folder, num_bytes: 2**20)
    plan = plan_of(file_bytes=10 * 2**20, step=0.1)  # 10 s to save
    assert preflight_checks.check_disk(replace(config, ckpt_every=1100), folder, plan).colour == "green"
    check = preflight_checks.check_disk(replace(config, ckpt_every=900), folder, plan)
    assert check.colour == "amber" and "10.0 s per save, with 90 s of training between" in check.found
    assert check.advice == "a larger --ckpt-every, or a faster disk"


def test_without_a_run_folder_the_place_of_the_results_is_looked_at(config, tmp_path):
    config = replace(config, results_dir=str(tmp_path / "not" / "yet"))
    check = preflight_checks.check_disk(config, None, plan_of())
    assert check.colour == "green" and not list(tmp_path.iterdir())


# ---- several ranks ----

def test_the_worst_rank_speaks_for_all():
    def of(*colours):
        return [[Check("data", colour, f"here {rank}", "do")] for rank, colour in enumerate(colours)]

    assert preflight.merge(of("green", "green"))[0].found == "here 0"
    worst, = preflight.merge(of("green", "amber", "red", "red"))
    assert (worst.colour, worst.found) == ("red", "rank 2: here 2")


def test_a_straggler_is_named_once_it_is_slow_enough():
    assert preflight.straggler({"matrix_product_seconds": [1.0, 1.1, 1.3, 0.9]}) == ""
    assert preflight.straggler({"matrix_product_seconds": [1.0, 1.1, 2.2, 1.1]}) == (
        "rank 2 computes 2.0 times as slowly as the others")
    assert preflight.straggler({"matrix_product_seconds": [1.0, 1.0], "seconds_per_sample": [3.0, 1.0]}) == (
        "rank 0 reads data 3.0 times as slowly as the others")


def test_bandwidth_is_that_of_a_ring_and_held_against_the_step(config):
    plan = plan_of(step=0.1, parameters=25_000_000)  # 100 MB of gradients, 150 MB over each of four links
    check = preflight.judge(config, 4, plan, latency=20e-6, seconds=1.5 * (25 << 20) / 10e9, slow="")
    assert check.figures["bytes_per_second"] == pytest.approx(10e9)
    assert check.colour == "green" and "latency 20 us, 10.00 GB/s, 15.0 ms for the gradients" in check.found
    slow_network = preflight.judge(config, 4, plan, latency=20e-6, seconds=1.5 * (25 << 20) / 2e9, slow="")
    assert slow_network.colour == "amber" and "--grad-accum" in slow_network.advice
    named = preflight.judge(config, 4, plan, 20e-6, 1e-3, slow="rank 2 computes 2.0 times as slowly as the others")
    assert named.colour == "amber" and "rank 2 computes" in named.found


TWO_RANKS = """
import sys, time
from dataclasses import replace as changed
from pathlib import Path
from dit import preflight, preflight_checks
from dit.cli import settle
from dit.config import replace
from dit.config_files import load_toml
from dit.parallel import processes

config = replace(settle(load_toml("configs/digits.toml")), num_workers=1)
measure = preflight_checks._matrix_product
with processes() as ranks:
    factor = 5.0 if ranks.rank == 1 else 1.0
    preflight_checks._matrix_product = lambda *args: (0.01 * factor, measure(*args)[1])
    plan = {"num_devices": 2}
    checks = preflight.preflight(config, None, ranks, plan)
    texts = ranks.gather([str(check) for check in checks])
    if ranks.is_main:
        print("same", texts[0] == texts[1])
        preflight.show(checks, print)
    if ranks.rank == 1:
        time.sleep(4)  # not there in time
    checks = preflight.preflight(config, None, ranks, plan, wait_seconds=1.5)
    if ranks.is_main:
        print("late", checks[-1])
        print("stops", bool(preflight.stopping(checks, config)))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_compare_notes_and_name_the_slow_and_the_missing_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "same True" in done.stdout
    said = r"preflight  amber  collectives    2 ranks, latency \d+ us, \d+\.\d\d GB/s; rank 1 computes 5.0 times"
    assert re.search(said, done.stdout), done.stdout
    assert "late red    collectives    rank 1 had not arrived after 1.5 s; see that" in done.stdout
    assert "stops True" in done.stdout


def test_a_network_that_fails_is_a_line(config, folder, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("NCCL error: unhandled system error\nmore")

    monkeypatch.setattr(preflight.dist, "monitored_barrier", fail)
    two = dataclasses.replace(RANKS, world_size=2)
    check = preflight.preflight(config, folder, two, plan_of(devices=2))[-1]
    assert (check.colour, check.found) == ("red", "RuntimeError: NCCL error: unhandled system error")
    assert preflight.stopping([check], config)
