"""Hold the planner against one GPU: many short configurations, each predicted first, then measured.

    python scripts/gpu_check.py --output benchmarks/gpu_h200.json

One process on the GPU (the predictions are traced in parallel by others, before it works), no network, at most four
minutes; neither diffusers nor tyro is needed. Predictions are frozen and hashed before anything is measured. A ratio
away from 1 is a fault to find, in the planner or here; nothing is fitted to these rows. Without a GPU it runs on the
CPU with two images per micro-batch, which shows that it works: name a few small configurations there, with --only.
"""

import argparse
import gc
import hashlib
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dit.config import TrainConfig, UsageError, replace

STEPS_FOR_MEMORY, STEPS_FOR_TIME = 3, 8
SECONDS_FOR_THE_LAST = 12
"""What a configuration that was begun in time may take beyond it."""
BASE = {"data": "synthetic", "num_workers": 0, "num_classes": 1000}
BF16, FP16 = {"amp": True, "amp_dtype": "bf16"}, {"amp": True, "amp_dtype": "fp16"}
TF32, FP32 = {}, {"tf32": False}


def matrix() -> dict[str, dict[str, object]]:
    """Name -> settings: models, patches, precisions, checkpointing, batches, accumulation, kernels, optimizers."""
    def case(model: str, batch: int, *changes: dict[str, object]) -> dict[str, object]:
        settings = {**BASE, "model": f"DiT-{model}", "global_batch_size": batch}
        for change in changes:
            settings |= change
        return settings

    ckpt, half = {"ckpt": True}, {"ckpt": True, "ckpt_blocks": 14}
    cases = {
        "S/2 fp32": case("S/2", 32, FP32), "S/2 tf32": case("S/2", 32, TF32), "S/2 bf16": case("S/2", 32, BF16),
        "S/2 fp16": case("S/2", 32, FP16), "S/4 bf16": case("S/4", 64, BF16), "S/8 bf16": case("S/8", 128, BF16),
        "B/2 tf32": case("B/2", 32, TF32), "B/2 bf16": case("B/2", 32, BF16),
        "B/2 bf16 ckpt": case("B/2", 32, BF16, ckpt),
        "B/4 tf32 x96": case("B/4", 96, TF32), "B/4 bf16 x96": case("B/4", 96, BF16), "B/8 fp16": case("B/8", 64, FP16),
        "L/2 bf16": case("L/2", 32, BF16), "L/2 bf16 ckpt": case("L/2", 32, BF16, ckpt),
        "L/4 tf32": case("L/4", 48, TF32), "L/4 bf16 accumulate 2": case("L/4", 64, BF16, {"grad_accum": 2}),
        "L/8 bf16": case("L/8", 64, BF16), "XL/2 bf16": case("XL/2", 16, BF16), "XL/2 bf16 x32": case("XL/2", 32, BF16),
        "XL/2 bf16 x64": case("XL/2", 64, BF16), "XL/2 bf16 ckpt": case("XL/2", 32, BF16, ckpt),
        "XL/2 bf16 half ckpt": case("XL/2", 32, BF16, half), "XL/2 fp16 ckpt": case("XL/2", 32, FP16, ckpt),
        "XL/2 tf32 ckpt": case("XL/2", 32, TF32, ckpt), "XL/4 bf16": case("XL/4", 64, BF16),
        "XL/8 tf32": case("XL/8", 64, TF32),
        "B/2 bf16 efficient": case("B/2", 32, BF16, {"attention": "efficient"}),
        "B/2 bf16 flash": case("B/2", 32, BF16, {"attention": "flash"}),
        "B/2 bf16 cudnn": case("B/2", 32, BF16, {"attention": "cudnn"}),
        "B/2 bf16 math": case("B/2", 32, BF16, {"attention": "math"}),
        "B/2 fp32 math": case("B/2", 32, FP32, {"attention": "math"}),
        "B/2 bf16 clip": case("B/2", 32, BF16, {"clip_grad": 1.0}),
        "B/2 bf16 foreach": case("B/2", 32, BF16, {"optimizer": "adamw-foreach"}),
        "B/2 bf16 no ema": case("B/2", 32, BF16, {"ema": "off"}),
        "S/2 bf16 512px": case("S/2", 16, BF16, {"image_size": 512}),
        "B/4 bf16 fixed variance": case("B/4", 64, BF16, {"learn_sigma": False}),
    }
    if importlib.util.find_spec("diffusers"):
        folder = {"data": "folder", "data_path": "unused", "vae": "ema"}
        cases["S/2 bf16 VAE in the loop"] = case("S/2", 16, BF16, folder)
        cases["S/2 bf16 VAE by 4"] = case("S/2", 16, BF16, folder, {"encode_chunk": 4})
    return cases


SNAPSHOT_OF = "B/2 bf16 ckpt"
"""The configuration whose every allocation is recorded and compared with the traced ones."""
BY_CLASS = ("S/8 bf16", "B/2 bf16", "B/2 bf16 ckpt", "L/4 tf32", "XL/2 bf16 x32")
"""Configurations whose operations are timed one by one and compared by class."""


@dataclass(frozen=True)
class Prediction:
    """Of one configuration: plan.json or the refusal, seconds by class of operation, sizes of a step's allocations."""

    plan: dict | str
    by_class: dict[str, float] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()


def config_of(settings: dict[str, object]) -> TrainConfig:
    return replace(TrainConfig(), **settings)


def predict(device_name: str, name: str, settings: dict[str, object]) -> Prediction:
    """Plan one configuration."""
    from dit.planner import calibration, plan
    from dit.planner.hardware import find_device
    from dit.planner.step_time import predict_time

    device, config = find_device(device_name), config_of(settings)
    try:
        planned = plan(config, device, 1)
    except UsageError as error:
        return Prediction(str(error))
    by_class = {}
    if name in BY_CLASS and planned.content["time"]["step_seconds"]["mid"] is not None:
        import torch

        found = calibration.find(*((calibration.cpu_name(), torch.get_num_threads()) if device.generation == "cpu" else
                                   (device.name,)))
        by_class = predict_time(planned.step, config, device, 1, found).by_class
    events = planned.step.events
    wanted = (events.step == 2) & (events.bytes > 0)
    return Prediction(planned.to_dict(), by_class, tuple(events.bytes[wanted].tolist()) if name == SNAPSHOT_OF else ())


def predict_all(device_name: str, cases: dict[str, dict[str, object]], seconds: float) -> dict[str, Prediction]:
    """The predictions that are ready within so many seconds. Their processes start afresh, not as copies of this one,
    which may hold the GPU.
    """
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))
    futures = {name: pool.submit(predict, device_name, name, settings) for name, settings in cases.items()}
    wait(futures.values(), timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    return {name: future.result() for name, future in futures.items() if future.done() and not future.cancelled()}


# ---- measuring ----

def measure(config: TrainConfig, device, record: bool = False) -> dict[str, object]:
    """Build what a run builds, take steps as a run takes them, and report bytes and seconds."""
    import torch

    from dit.codec import build_codec
    from dit.data import PositionDataset, SyntheticData, micro_batches
    from dit.metrics_memory import MemoryWatch, device_used_bytes
    from dit.precision import resolve
    from dit.step import build_parts, train_step

    before = device_used_bytes(device)
    codec = build_codec(config.vae, device=device, chunk=config.data.encode_chunk,
                        random_weights=True) if config.encodes_in_loop else build_codec("none")
    parts = build_parts(config, device, codec, resolve(config, device))
    shape = (3, *config.image_hw) if config.encodes_in_loop else config.latent_shape
    dataset = PositionDataset(SyntheticData(shape, config.model.num_classes), seed=0, noise_shape=config.latent_shape,
                              needs_posterior_noise=config.encodes_in_loop)
    batch, accumulation = config.memory.global_batch_size, config.memory.grad_accum
    batches = micro_batches(dataset, start_step=0, global_batch=batch, accumulation=accumulation, pin_memory=False)
    ready = iter([next(batches) for _ in range(accumulation)] * (STEPS_FOR_MEMORY + STEPS_FOR_TIME + 2))
    step = partial(train_step, parts, ready, accumulation, lr=1e-4, ema_decay=0.99)

    watch, seen = MemoryWatch(device), []
    for _ in range(STEPS_FOR_MEMORY):
        seen.append(watch.run(lambda phase: step(phase=phase))[1])
    allocations = recorded_allocations(step) if record else []
    step()
    seconds, by_phase = time_steps(step, device)
    used = device_used_bytes(device)
    return {"peak_allocated_bytes": max(memory.peak_allocated for memory in seen),
            "peak_reserved_bytes": max((memory.peak_reserved or 0 for memory in seen), default=0) or None,
            "device_used_bytes": used, "device_used_before_bytes": before, "by_phase": watch.peak_by_phase,
            "step_seconds": seconds, "seconds_by_phase": by_phase, "allocations": allocations,
            "allocated_after_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else None}


def time_steps(step, device) -> tuple[list[float], dict[str, float]]:
    """Seconds of each of several steps, and the median of every phase of one more round, by the device's own clock."""
    from dit.metrics import Clock

    clock, marks, phases = Clock(device), [], []
    marks.append(clock.mark())
    for _ in range(STEPS_FOR_TIME - 2):
        step()
        marks.append(clock.mark())

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        start = clock.mark()
        yield
        phases.append((name, start, clock.mark()))

    for _ in range(2):
        step(phase=phase)
    seconds = [clock.seconds(start, end) for start, end in zip(marks, marks[1:], strict=False)]
    by_phase: dict[str, float] = {}
    for name, start, end in phases:
        by_phase[name] = by_phase.get(name, 0.0) + clock.seconds(start, end) / 2
    return seconds, by_phase


def seconds_by_class(config: TrainConfig, device) -> dict[str, float]:
    """Seconds of a step's operations by class, each the least of a few timings."""
    from dit.planner.micro_benchmarks import time_gpu_step, time_step
    from dit.planner.op_class import works

    if device.type == "cuda":
        ops, seconds, _, _ = time_gpu_step(config, repeats=3)
        timed = zip(works(ops), seconds, strict=True)
    else:
        step = time_step("", config, repeats=2)
        timed = zip(step.works, step.seconds, strict=True)
    found: dict[str, float] = {}
    for work, seconds in timed:
        found[work.cls] = found.get(work.cls, 0.0) + seconds
    return found


def recorded_allocations(step) -> list[int]:
    """Sizes in bytes of every allocation of one step, as the caching allocator's own history has them."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    step()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [entry["size"] for entry in trace if entry["action"] == "alloc"]


def compare_allocations(traced: Iterable[int], recorded: Iterable[int]) -> dict[str, object]:
    """Sizes predicted and not seen, and seen and not predicted, of allocations above 64 KiB, rounded to 512 bytes."""
    def counted(sizes: Iterable[int]) -> Counter:
        return Counter(-(-size // 512) * 512 for size in sizes if size > 1 << 16)

    predicted, seen = counted(traced), counted(recorded)
    return {"predicted": sum(predicted.values()), "recorded": sum(seen.values()),
            "only_predicted": dict((predicted - seen).most_common(20)),
            "only_recorded": dict((seen - predicted).most_common(20))}


def free(device) -> None:
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---- the report ----

def row_of(name: str, settings: dict[str, object], plan: dict, measured: dict[str, object]) -> dict[str, object]:
    """One line of the result: predicted, measured, and measured / predicted."""
    step = statistics.median(measured["step_seconds"])
    pairs = {"peak_allocated_bytes": (plan["memory"]["peak_allocated_bytes"], measured["peak_allocated_bytes"]),
             "peak_reserved_bytes": (plan["memory"]["peak_reserved_bytes"], measured["peak_reserved_bytes"]),
             "device_used_bytes": (plan["memory"]["device_used_bytes"]["mid"], measured["device_used_bytes"]),
             "step_seconds": (plan["time"]["step_seconds"]["mid"], step)}
    ratios = {key: seen / planned if planned and seen else None for key, (planned, seen) in pairs.items()}
    return {"name": name, "settings": settings, "predicted": {"memory": plan["memory"], "time": plan["time"]},
            "measured": {key: value for key, value in measured.items() if key != "allocations"}, "ratios": ratios}


def print_row(row: dict[str, object]) -> None:
    measured, ratios = row["measured"], row["ratios"]
    cells = [f"{row['name']:26s}", f"{measured['peak_allocated_bytes'] / 2**30:7.3f} GiB",
             f"{1e3 * statistics.median(measured['step_seconds']):8.1f} ms"]
    cells += [f"{name.split('_')[1]} {ratio:.4f}" for name, ratio in ratios.items() if ratio is not None]
    print("  ".join(cells), flush=True)


def chosen(names: str) -> dict[str, dict[str, object]]:
    """The configurations to run: all, or those named. Raises UsageError for an unknown name."""
    cases = matrix()
    wanted = names.split(",") if names else list(cases)
    unknown = [name for name in wanted if name not in cases]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: unknown; configurations are {', '.join(cases)}")
    return {name: cases[name] for name in wanted}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="comma-separated names of configurations; default: all")
    parser.add_argument("--seconds", type=float, default=225.0, help="start no configuration after so many seconds")
    flags = parser.parse_args(args)
    started = time.monotonic()
    cases = chosen(flags.only)

    import torch

    from dit.run_folder import device_name, environment

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    planned_for = device_name(device) if device.type == "cuda" else "cpu"
    if device.type == "cpu":
        cases = {name: case | {"global_batch_size": 2 * case.get("grad_accum", 1)} for name, case in cases.items()}
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.alarm(int(flags.seconds) + SECONDS_FOR_THE_LAST)
    predictions = predict_all(planned_for, cases, flags.seconds / 2)
    frozen = json.dumps({name: each.plan for name, each in predictions.items()}, sort_keys=True)
    result = {"environment": environment(device, 1), "predictions_sha256": hashlib.sha256(frozen.encode()).hexdigest(),
              "seconds_predicting": time.monotonic() - started, "rows": [], "failed": {}, "left_out": []}
    print(f"{len(predictions)} predictions frozen in {result['seconds_predicting']:.0f} s", flush=True)
    for name, settings in cases.items():
        if name not in predictions or time.monotonic() - started > flags.seconds:
            result["left_out"].append(name)
        else:
            run_one(name, settings, predictions[name], device, result)
            free(device)
        result["seconds"] = time.monotonic() - started
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        flags.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(result['rows'])} measured, {len(result['failed'])} failed, {len(result['left_out'])} left out, "
          f"{time.monotonic() - started:.0f} s: {flags.output}")
    return 1 if result["failed"] else 0


def _time_is_up(*_: object) -> None:
    raise RuntimeError("the time was up")


def run_one(name: str, settings: dict[str, object], prediction: Prediction, device, result: dict[str, object]) -> None:
    """Measure one configuration and add its row, or why it failed, to ``result``."""
    config = config_of(settings)
    try:
        if isinstance(prediction.plan, str):
            raise UsageError(prediction.plan)
        measured = measure(config, device, record=name == SNAPSHOT_OF and device.type == "cuda")
        row = row_of(name, settings, prediction.plan, measured)
        if name in BY_CLASS:
            seen = seconds_by_class(config, device)
            row["seconds_by_class"] = {cls: {"predicted": prediction.by_class.get(cls), "measured": seconds}
                                       for cls, seconds in sorted(seen.items(), key=lambda item: -item[1])}
    except (UsageError, RuntimeError) as error:  # one configuration less; the others still count
        result["failed"][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"{name:26s}  {result['failed'][name]}", flush=True)
        return
    result["rows"].append(row)
    print_row(row)
    if measured["allocations"]:
        result["snapshot"] = {"of": name, **compare_allocations(prediction.sizes, measured["allocations"])}


if __name__ == "__main__":
    from dit.cli import run

    sys.exit(run(main))
