#!/usr/bin/env python3
"""Hold the time planner against measurements it has never seen.

    python scripts/check_time.py cpu       # 25 configurations on this CPU: planned first, then measured (5 minutes)
    python scripts/check_time.py ranks     # two processes with gloo on this CPU (1 minute)
    python scripts/check_time.py public    # public training runs on A100s, planned from the catalogue alone (1 minute)

Needs a calibration for ``cpu`` and ``ranks`` (scripts/calibrate.py, for ranks with --threads 1 too). Writes
benchmarks/time_WHAT.md and .json. The models of the calibration are others than the ones here, see the tests.
"""
from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dit.config import PRESETS, TrainConfig, UsageError, replace  # noqa: E402
from dit.config_checks import validate  # noqa: E402
from dit.planner import calibration, hardware, traced  # noqa: E402
from dit.planner.public_runs import public_runs  # noqa: E402
from dit.planner.step_time import TimePlan, predict_time  # noqa: E402

PASSES, STEPS, WARMUP = 3, 5, 2
REFERENCE = (256, 1, 4, 16, 48)  # width, depth, heads, side, batch: one of the steps that scripts/calibrate.py times


def custom(width: int, depth: int, heads: int, side: int, batch: int, **changes: object) -> TrainConfig:
    """A model on ``side`` x ``side`` latents of 4 channels, patch 2."""
    return validate(replace(TrainConfig(), model="custom", data="synthetic", vae="none", image_size=side, patch_size=2,
                            num_classes=10, hidden_size=width, depth=depth, num_heads=heads, global_batch_size=batch,
                            **changes))


def preset(name: str, image_size: int, batch: int, **changes: object) -> TrainConfig:
    """One of the paper's models on latents of ``image_size`` / 8."""
    assert name in PRESETS
    return validate(replace(TrainConfig(), model=name, data="synthetic", vae="ema", image_size=image_size,
                            global_batch_size=batch, **changes))


def cpu_configs() -> dict[str, TrainConfig]:
    """What is planned and measured: models, batches, dtypes, checkpointing, accumulation, attention, optimizer."""
    bf16 = {"amp": True, "amp_dtype": "bf16"}
    digits = replace(custom(128, 6, 4, 8, 128), data="digits", vae=None)
    return {
        "digits model, batch 128": digits,
        "digits model, --ckpt": replace(digits, ckpt=True),
        "digits model, --grad-accum 4": replace(digits, grad_accum=4),
        "digits model, batch 16": replace(digits, global_batch_size=16),
        "DiT-S/2, 64 px, batch 16": preset("DiT-S/2", 64, 16),
        "DiT-S/4, 128 px, batch 8": preset("DiT-S/4", 128, 8),
        "DiT-S/8, 256 px, batch 8, --ckpt": preset("DiT-S/8", 256, 8, ckpt=True),
        "DiT-B/8, 256 px, batch 4": preset("DiT-B/8", 256, 4),
        "width 128, 64 tokens, batch 32": custom(128, 4, 4, 16, 32),
        "width 128, 64 tokens, --ckpt": custom(128, 4, 4, 16, 32, ckpt=True),
        "width 128, 64 tokens, unfused": custom(128, 4, 4, 16, 32, attention="math"),
        "width 224, 64 tokens, batch 16": custom(224, 3, 7, 16, 16),
        "width 320, 16 tokens, batch 64": custom(320, 2, 5, 8, 64),
        "width 48, 16 tokens, batch 256": custom(48, 6, 3, 8, 256),
        "width 80, 64 tokens, batch 64": custom(80, 4, 5, 16, 64),
        "width 512, 16 tokens, batch 32": custom(512, 2, 8, 8, 32),
        "width 160, 36 tokens, --grad-accum 2": custom(160, 4, 4, 12, 48, grad_accum=2),
        "width 128, 256 tokens, batch 8": custom(128, 4, 4, 32, 8),
        "width 128, 256 tokens, 2 of 4 --ckpt": custom(128, 4, 4, 32, 8, ckpt=True, ckpt_blocks=2),
        "width 256, foreach, --clip-grad": custom(256, 6, 4, 8, 8, optimizer="adamw-foreach", clip_grad=1.0),
        "width 64, 4 tokens, batch 8": custom(64, 12, 2, 4, 8),
        "width 1152, head size 72, batch 8": custom(1152, 1, 16, 8, 8),
        "width 128, bf16, batch 8": custom(128, 3, 4, 8, 8, **bf16),
        "width 96, bf16, --ckpt": custom(96, 4, 3, 8, 16, ckpt=True, **bf16),
        "width 192, bf16, --grad-accum 2": custom(192, 2, 3, 8, 16, grad_accum=2, **bf16),
    }


def plan(config: TrainConfig, device: hardware.Device, num_devices: int, found: calibration.Calibration) -> TimePlan:
    """The time plan of ``config``, its data taken as ready."""
    micro_batch = config.micro_batch(num_devices)
    step = traced(config, device, micro_batch).at(micro_batch)
    return predict_time(step, config, device, num_devices, found, data_seconds=0.0)


def calibrated(threads: int) -> calibration.Calibration:
    found = calibration.find(calibration.cpu_name(), threads)
    if found is None:
        raise UsageError(f"this CPU is not calibrated for {threads} threads: scripts/calibrate.py --threads {threads}")
    return found


# ---- this CPU ----

def check_cpu() -> None:
    import torch

    found, device = calibrated(torch.get_num_threads()), hardware.cpu_device()
    configs = cpu_configs()
    plans = {name: plan(config, device, 1, found) for name, config in configs.items()}  # all of them, before any run
    reference = custom(*REFERENCE)
    planned = plan(reference, device, 1, found).step_seconds["mid"]
    seconds, speed = {name: [] for name in configs}, {name: [] for name in configs}
    for _ in range(PASSES):  # apart from each other: the machine is faster in some minutes than in others
        for name, config in configs.items():
            seconds[name] += measured(config)
            speed[name].append(statistics.median(measured(reference)) / planned)
    rows = [{**row(name, plans[name], sorted(seconds[name])), "drift": statistics.median(speed[name])}
            for name in configs]
    errors = [abs((1 + each["error"]) * each["drift"] - 1) for each in rows]
    report("cpu", f"Planned and measured on {calibration.cpu_name()}, {torch.get_num_threads()} threads. Calibration: "
           f"{found.source}, fitted to other models and single operations. Measured: median of {PASSES} passes over "
           f"the table with {STEPS} steps each, and quartiles. Beside each configuration a step of the calibration's "
           f"own models was timed: the machine took {_span(each['drift'] for each in rows)} times as long for it as "
           f"when it was calibrated. With that taken out the median error is {100 * statistics.median(errors):.1f} %, "
           f"the worst {100 * max(errors):.1f} %; the table has it in.", rows)


def _span(values: Iterator[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


def measured(config: TrainConfig) -> list[float]:
    """Seconds of STEPS steps."""
    from dit.planner.micro_benchmarks import stepper

    step = stepper(config)
    for _ in range(WARMUP):
        step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


# ---- two processes ----

RANK_CONFIGS = ("--model custom --hidden-size 128 --depth 6 --num-heads 4 --patch-size 2 --image-size 16 "
                "--global-batch-size 64",
                "--model custom --hidden-size 256 --depth 4 --num-heads 4 --patch-size 2 --image-size 8 "
                "--global-batch-size 64 --grad-accum 2",
                "--model custom --hidden-size 384 --depth 4 --num-heads 6 --patch-size 2 --image-size 16 "
                "--global-batch-size 16 --ckpt")
RANK_FLAGS = "--data synthetic --vae none --num-classes 10 --num-workers 0 --max-steps 30 --plan off"


def check_ranks() -> None:
    import tempfile

    from dit.cli import train_config
    from dit.metrics import read_metrics

    found, device = calibrated(1), hardware.cpu_device()
    rows = []
    for flags in RANK_CONFIGS:
        words = [*flags.split(), *RANK_FLAGS.split()]
        config = train_config(words, prog="check_time.py")
        micro_batch = config.micro_batch(2)
        planned = predict_time(traced(config, device, micro_batch).at(micro_batch), config, device, 2, found)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", *words]
            subprocess.run([*command, "--run-dir", folder], cwd=ROOT, check=True, capture_output=True)
            steps = read_metrics(Path(folder) / "metrics.jsonl")
        seconds = sorted(step["step_seconds"] for step in steps[5:] if step["step_seconds"])
        name = flags.replace("--model custom ", "").replace("--patch-size 2 ", "")
        rows.append(row(name, planned, seconds))
        print(text_row(rows[-1]), flush=True)
    report("ranks", f"Two processes of one thread each, gloo, on {calibration.cpu_name()}. Calibration: "
           f"{found.source}.", rows)


# ---- public runs ----

def check_public() -> None:
    rows = []
    for run in public_runs(ROOT / "tests" / "data" / "public.csv"):
        micro_batch = run.config.micro_batch(run.num_devices)
        step = traced(run.config, run.device, micro_batch).at(micro_batch)
        rows.append({**row(f"{run.id}: {run.said}", predict_time(step, run.config, run.device, run.num_devices),
                           [run.step_seconds]), "judged": run.judged, "remark": run.remark})
        print(text_row(rows[-1]), flush=True)
    report("public", "Planned from the catalogue and `dit/planner/priors.py` alone; measured by others (sources in "
           "tests/data/public.csv). With the first priors FD-L1 to FD-L5 were off by -4, -12, -10, -21 and +28 %. "
           "Then, once and for all of them together, the priors of gemm, elementwise, copy, norm and reduction kernels "
           "and of fp32 convolutions (Winograd) were moved within their published ranges; no constant belongs to one "
           "row, and the other rows were only held against it.", rows)


# ---- rows ----

def row(name: str, planned: TimePlan, seconds: list[float]) -> dict[str, object]:
    """One line of a table: seconds planned and measured. ``error`` is planned over measured, less one."""
    middle = statistics.median(seconds)
    span = planned.step_seconds
    return {"name": name, "low": span["low"], "mid": span["mid"], "high": span["high"], "measured": middle,
            "quartiles": [seconds[len(seconds) // 4], seconds[3 * len(seconds) // 4]],
            "error": span["mid"] / middle - 1, "within": span["low"] <= middle <= span["high"],
            "bound_by": planned.bound_by}


def text_row(values: dict[str, object]) -> str:
    low, high = values["quartiles"]
    spread = f" ({1e3 * low:.1f}-{1e3 * high:.1f})" if low != high else ""
    return (f"| {values['name']} | {1e3 * values['mid']:.1f} ({1e3 * values['low']:.1f}-{1e3 * values['high']:.1f}) | "
            f"{1e3 * values['measured']:.1f}{spread} | {100 * values['error']:+.1f} % | "
            f"{'inside' if values['within'] else 'outside'} | {values['bound_by']} |")


def summary(rows: list[dict[str, object]]) -> str:
    judged = [values for values in rows if values.get("judged", True)]
    errors = [abs(values["error"]) for values in judged]
    inside = sum(values["within"] for values in judged)
    return (f"{len(judged)} rows judged: median error {100 * statistics.median(errors):.1f} %, "
            f"worst {100 * max(errors):.1f} %, {inside} of {len(judged)} inside the interval")


def report(what: str, said: str, rows: list[dict[str, object]]) -> None:
    """Write both files of a check. How busy the machine was at the end is said."""
    if what != "public":
        said += f" Load average over the last 15 minutes: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores."
    folder = ROOT / "benchmarks"
    folder.mkdir(exist_ok=True)
    lines = [f"# Step time, planned and measured: {what}", "", f"    python scripts/check_time.py {what}", "", said, "",
             f"**{summary(rows)}.**", "",
             "| configuration | planned ms (low-high) | measured ms (quartiles) | error | interval | bound by |",
             "|---|---|---|---|---|---|", *map(text_row, rows), "", *remarks(rows)]
    (folder / f"time_{what}.md").write_text("\n".join(lines) + "\n")
    content = {"said": said, "summary": summary(rows), "rows": rows}
    (folder / f"time_{what}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{summary(rows)}\nwritten: benchmarks/time_{what}.md")


def remarks(rows: list[dict[str, object]]) -> Iterator[str]:
    """What has to be known about single rows."""
    for values in rows:
        if values.get("remark"):
            said = "" if values["judged"] else " (not judged)"
            yield f"- {values['name'].split(':')[0]}{said}: {values['remark']}"


def main(args: list[str]) -> None:
    checks = {"cpu": check_cpu, "ranks": check_ranks, "public": check_public}
    if len(args) != 1 or args[0] not in checks:
        raise UsageError(f"check_time.py takes one of {', '.join(checks)}")
    checks[args[0]]()


if __name__ == "__main__":
    from dit.cli import run

    run(main)
