"""Public training runs of DiT as configurations, to hold plans against. Needs no torch.

What those runs did and this project does not (an average updated tensor by tensor, an optimizer without fused kernels,
a loader short of cores) is a remark, not a correction.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from dit.config import TrainConfig, replace
from dit.planner.hardware import Device, find_device


@dataclass(frozen=True)
class PublicRun:
    """A published speed. ``judged`` is False where something other than the step is known to have been the limit."""

    id: str
    said: str
    config: TrainConfig
    device: Device
    num_devices: int
    step_seconds: float
    judged: bool
    remark: str


# id -> settings beyond those of all runs (the official script: AdamW, average, unfused attention), and a remark.
_CKPT, _LATENTS = {"ckpt": True}, {"data": "latents"}
_FP16, _FP32 = {"amp": True, "amp_dtype": "fp16"}, {"tf32": False}
_LOADER = "two CPU cores fed eight loader processes: the source suspects the data"
_TORCHDITAN = {"model": "custom", "depth": 24, "hidden_size": 1024, "num_heads": 16, "patch_size": 2,
               "data": "synthetic", "amp": True, "amp_dtype": "bf16", "attention": "flash", "ema": "off"}
_LIKE = ("a LLaMA-style model of this width and depth under FSDP over a link that is not named, read off a plot, "
         "planned as DiT with DDP; from batch 512 to 1024 it takes 196 ms more (planned: 239), beside 0.7 s that do "
         "not grow")
_RUNS: dict[str, tuple[dict[str, object], bool, str]] = {
    "FD-L1": (_CKPT, True, ""),
    "FD-L2": (_CKPT | _FP16, True, ""),
    "FD-L3": (_CKPT | _LATENTS, True, ""),
    "FD-L4": (_CKPT | _LATENTS | _FP16, True, "the README of the same repository says 0.84 steps/s for this setting"),
    "FD-L5": (_CKPT | _FP32, True, ""),
    "FD-M1": (_CKPT, True, _LOADER),
    "FD-M2": (_CKPT | _FP16, True, _LOADER),
    "FD-M3": (_CKPT | _LATENTS, True, ""),
    "FD-M4": (_CKPT | _LATENTS | _FP16, True, ""),
    "FD-M5": (_CKPT | _FP32, True, ""),
    "FD-M6": ({}, False, "as fast as FD-M1 with checkpointing, so limited by its data"),
    "FB-1": (_FP32, True, ""),
    "FB-2": ({}, False, "half the speed that others report for the same script: limited by its data"),
    "TD-1": (_TORCHDITAN, False, _LIKE),
    "TD-2": (_TORCHDITAN | {"ckpt": True, "ckpt_every_nth": 2}, False, "as TD-1"),
    "TD-3": (_TORCHDITAN, False, "as TD-1; compiled, planned as eager"),
    "TD-4": (_TORCHDITAN | {"ckpt": True, "ckpt_every_nth": 2}, False, "as TD-3"),
}


def public_runs(path: Path) -> list[PublicRun]:
    """The runs of ``public.csv`` that say how fast a DiT trained on known GPUs."""
    with open(path, newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    return [_run(rows[name], *values) for name, values in _RUNS.items()]


def _run(row: dict[str, str], settings: dict[str, object], judged: bool, remark: str) -> PublicRun:
    config = replace(TrainConfig(), **{
        "model": row["model"], "attention": "math", "optimizer": "adamw-foreach", "data_path": "unused",
        "global_batch_size": int(row["global_batch"])} | settings)
    checkpointing = "ckpt" if config.memory.ckpt else "no ckpt"
    source = {"folder": "VAE in the loop", "latents": "latents", "synthetic": "dummy data"}[config.data.data]
    precision = row["precision"].split(" (")[0]
    said = f"{row['num_gpus']} x A100, batch {row['global_batch']}, {precision}, {checkpointing}, {source}"
    return PublicRun(row["id"], said, config, find_device("A100-SXM4-80GB"), int(row["num_gpus"]),
                     1 / float(row["steps_per_s"]), judged, remark)
