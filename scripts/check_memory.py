"""Hold the planned tensor bytes of training steps on this CPU against the measured ones, over a matrix of
configurations.

    python scripts/check_memory.py [--output benchmarks/memory_cpu.md] [NAME ...]

Every configuration is traced on meta tensors and then really trained for three steps under torch's profiler; nothing is
fitted. The low-bit optimizers need torchao (pip install .[lowbit]). Exits 1 if a peak is off by more than 1 % or a
phase by more than 2 %.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dit.cli import run
from dit.codec import Codec, build_codec, codec_spec
from dit.config import TrainConfig, replace
from dit.metrics_memory import live_tensor_bytes, measure_tensor_peak, profiled_phase
from dit.planner import memory_of, traced
from dit.planner.hardware import cpu_device
from dit.precision import resolve
from dit.sampling import grid_batches
from dit.step import StepParts, build_parts, train_step

PEAK_TOLERANCE, PHASE_TOLERANCE = 0.01, 0.02
STEPS = 3
TINY_VAE = {"block_out_channels": [16, 32, 32, 32], "layers_per_block": 1, "norm_num_groups": 8, "latent_channels": 4,
            "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}

SMALL = dict(model="custom", depth=3, hidden_size=192, num_heads=3, patch_size=2, image_size=128)
WIDE = dict(model="custom", depth=2, hidden_size=288, num_heads=4, patch_size=2, image_size=64)  # XL's head size, 72
DIGITS = dict(model="custom", depth=4, hidden_size=96, num_heads=3, patch_size=2, image_size=8, data="digits",
              num_classes=10)
ENCODED = dict(SMALL, depth=2, data="folder", image_size=64)
AMP, CKPT, SAMPLES = dict(amp=True), dict(ckpt=True), dict(sample_every=1)
FP16 = dict(amp=True, amp_dtype="fp16")

CONFIGURATIONS: dict[str, tuple[dict[str, object], int]] = {
    "fp32": (SMALL, 8), "fp32, batch 1": (SMALL, 1), "fp32, batch 2": (SMALL, 2), "fp32, batch 37": (SMALL, 37),
    "bf16": (SMALL | AMP, 8), "bf16, batch 1": (SMALL | AMP, 1), "bf16, batch 3": (SMALL | AMP, 3),
    "fp16": (SMALL | FP16, 8),
    "ckpt": (SMALL | CKPT, 16), "ckpt 1 of 3": (SMALL | CKPT | dict(ckpt_blocks=1), 8),
    "ckpt 2 of 3": (SMALL | CKPT | dict(ckpt_blocks=2), 8), "ckpt, batch 64": (SMALL | CKPT, 64),
    "bf16 ckpt": (SMALL | AMP | CKPT, 8), "bf16 ckpt 2 of 3": (SMALL | AMP | CKPT | dict(ckpt_blocks=2), 8),
    "fp16 ckpt": (SMALL | FP16 | CKPT, 4),
    "accumulation 2": (SMALL | dict(grad_accum=2), 8), "accumulation 3": (SMALL | dict(grad_accum=3), 4),
    "accumulation 5 ckpt": (SMALL | CKPT | dict(grad_accum=5), 4),
    "bf16 accumulation 2": (SMALL | AMP | dict(grad_accum=2), 4),
    "fp16 accumulation 2 clip": (SMALL | FP16 | dict(grad_accum=2, clip_grad=1.0), 4),
    "clip": (SMALL | dict(clip_grad=1.0), 8), "foreach": (SMALL | dict(optimizer="adamw-foreach"), 2),
    "foreach clip bf16": (SMALL | AMP | dict(optimizer="adamw-foreach", clip_grad=0.5), 2),
    "foreach ckpt": (SMALL | CKPT | dict(optimizer="adamw-foreach"), 8),
    "no average": (SMALL | dict(ema="off"), 8), "no average ckpt": (SMALL | CKPT | dict(ema="off"), 8),
    "fixed variance": (SMALL | dict(learn_sigma=False), 8), "unconditional": (SMALL | dict(num_classes=0), 8),
    "no label drop": (SMALL | dict(class_dropout_prob=0.0), 8),
    "math attention": (SMALL | dict(attention="math"), 8),
    "math attention bf16": (SMALL | AMP | dict(attention="math"), 4),
    "math attention ckpt": (SMALL | CKPT | dict(attention="math"), 8),
    "64 px": (SMALL | dict(image_size=64), 16), "256 px": (SMALL | dict(image_size=256, depth=2), 4),
    "128 x 192 px": (SMALL | dict(image_size=(128, 192)), 8), "patch 4": (SMALL | dict(patch_size=4), 16),
    "patch 8 ckpt": (SMALL | CKPT | dict(patch_size=8), 32), "head size 72": (WIDE, 8),
    "head size 72 bf16": (WIDE | AMP, 8), "head size 72 ckpt": (WIDE | CKPT, 32),
    "S/8": (dict(model="DiT-S/8"), 2), "S/4 ckpt": (dict(model="DiT-S/4") | CKPT, 4),
    "B/8 ckpt": (dict(model="DiT-B/8") | CKPT, 2),
    "digits": (DIGITS, 128), "digits bf16": (DIGITS | AMP, 128), "digits ckpt": (DIGITS | CKPT, 128),
    "VAE": (ENCODED, 8), "VAE ckpt": (ENCODED | CKPT, 16), "VAE bf16": (ENCODED | AMP, 4),
    "VAE by 3": (ENCODED | dict(encode_chunk=3), 8), "VAE 64 x 128 px": (ENCODED | dict(image_size=(64, 128)), 4),
    "VAE accumulation 2": (ENCODED | dict(grad_accum=2), 4),
    "8 bits": (SMALL | dict(optimizer="adamw-8bit"), 2),
    "8 bits ckpt accumulation 2": (SMALL | CKPT | dict(optimizer="adamw-8bit", grad_accum=2), 16),
    "4 bits": (SMALL | dict(optimizer="adamw-4bit"), 2),
    "4 bits bf16": (SMALL | AMP | dict(optimizer="adamw-4bit"), 16),
    "average on the host": (SMALL | dict(ema="host"), 8), "average on the host bf16 ckpt": (
        SMALL | AMP | CKPT | dict(ema="host"), 8),
    "samples of pixels": (DIGITS | SAMPLES, 4), "samples of pixels bf16 ckpt": (DIGITS | AMP | CKPT | SAMPLES, 32),
    "samples by a VAE": (SMALL | SAMPLES, 2), "samples by a VAE bf16 ckpt": (SMALL | AMP | CKPT | SAMPLES, 2),
    "samples by the VAE in the loop": (ENCODED | SAMPLES, 2),
    "samples, average on the host": (SMALL | SAMPLES | dict(ema="host"), 2),
}


@dataclass(frozen=True)
class Check:
    """Planned and measured bytes of one configuration, whole and by phase."""

    name: str
    planned: int
    measured: int
    planned_phases: dict[str, int]
    measured_phases: dict[str, int]
    seconds: float

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def worst_phase(self) -> tuple[str, float]:
        """The phase that is off most, and planned over measured there."""
        ratios = {name: self.planned_phases[name] / size for name, size in self.measured_phases.items()}
        return max(ratios.items(), key=lambda item: abs(item[1] - 1))

    @property
    def passed(self) -> bool:
        return abs(self.ratio - 1) <= PEAK_TOLERANCE and abs(self.worst_phase[1] - 1) <= PHASE_TOLERANCE


def settings(name: str, vae_folder: str | Path) -> tuple[TrainConfig, int]:
    """The configuration of a name and its micro-batch."""
    changes, micro_batch = CONFIGURATIONS[name]
    data = changes.get("data", "synthetic")
    if data == "folder":
        changes = changes | dict(vae=str(vae_folder), data_path=str(vae_folder))
    elif data == "synthetic" and "sample_every" in changes:
        changes = changes | dict(vae=str(vae_folder))
    batch = micro_batch * changes.get("grad_accum", 1)
    return replace(TrainConfig(), **(dict(data=data, global_batch_size=batch) | changes)), micro_batch


def write_tiny_vae(folder: Path) -> None:
    """A VAE's config.json; planning and measuring take random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", **TINY_VAE}))


def check(name: str, config: TrainConfig, micro_batch: int) -> Check:
    """Plan a configuration, then train it for real."""
    start = time.perf_counter()
    device = cpu_device()
    plan = memory_of(config, device, 1, traced(config, device, micro_batch).at(micro_batch))
    measured, phases = measure(config, micro_batch)
    return Check(name, plan.peak_allocated_bytes, measured, {name: plan.by_phase[name] for name in phases}, phases,
                 time.perf_counter() - start)


def measure(config: TrainConfig, micro_batch: int) -> tuple[int, dict[str, int]]:
    """Highest tensor bytes of three real steps, and of each phase."""
    cpu, others = torch.device("cpu"), live_tensor_bytes()
    precision = resolve(config, cpu)
    latents_only = Codec(codec_spec("none"))
    needs_vae = config.encodes_in_loop or config.run.sample_every
    codec = build_codec(config.vae, random_weights=True, chunk=config.data.encode_chunk) if needs_vae else latents_only
    parts = build_parts(config, cpu, codec if config.encodes_in_loop else latents_only, precision)
    micro_batches, peak, phases = _batches(config, micro_batch), 0, {}

    def step():
        return train_step(parts, micro_batches, config.memory.grad_accum, lr=1e-4, ema_decay=0.9, phase=profiled_phase)

    work = [step, partial(draw, config, parts, codec)] if config.run.sample_every else [step]
    for each in work * STEPS:
        _, found = measure_tensor_peak(each, live_tensor_bytes() - others)
        peak = max(peak, found.peak_bytes)
        phases |= {name: max(size, phases.get(name, 0)) for name, size in found.by_phase.items()}
    return peak, phases


def draw(config: TrainConfig, parts: StepParts, codec: Codec) -> None:
    """A sample grid as a run draws it, with fewer steps."""
    with profiled_phase("sample"), parts.ema.swapped_in() if parts.ema is not None else nullcontext():
        list(grid_batches(config, parts.model, parts.diffusion, codec, device=parts.device,
                          autocast=parts.precision.autocast, num_steps=4))


def _batches(config: TrainConfig, micro_batch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches as the loader makes them, but in the training process's own memory, where the profiler sees
    them."""
    latents = (micro_batch, *config.latent_shape)
    while True:
        yield {"x": torch.empty(micro_batch, 3, *config.image_hw).uniform_(-1, 1) if config.encodes_in_loop
               else torch.empty(latents).normal_(), "noise": torch.empty(latents).normal_(),
               "y": torch.zeros(micro_batch, dtype=torch.int64), "t": torch.full((micro_batch,), 500),
               "drop": torch.zeros(micro_batch, dtype=torch.bool),
               **({"posterior_noise": torch.empty(latents).normal_()} if config.encodes_in_loop else {})}


def table(checks: list[Check]) -> str:
    """The result as Markdown."""
    lines = ["# Planned and measured tensor bytes of training steps on a CPU", "",
             f"Command: `python scripts/check_memory.py`. {platform.machine()}, {torch.get_num_threads()} threads, "
             f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, three steps each; nothing was "
             "fitted. Worst phase: the phase that is off most.", "",
             "| configuration | planned bytes | measured bytes | planned / measured | worst phase | there |",
             "|---|---:|---:|---:|---|---:|"]
    for each in checks:
        phase, ratio = each.worst_phase
        figures = f"{each.planned:,} | {each.measured:,} | {each.ratio:.5f} | {phase} | {ratio:.5f}"
        lines.append(f"| {each.name} | {figures} |")
    worst = max(checks, key=lambda each: abs(each.ratio - 1))
    lines += ["", f"{len(checks)} configurations; the worst peak is {worst.name} with {worst.ratio:.5f}."]
    return "\n".join(lines) + "\n"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"configurations; default: all {len(CONFIGURATIONS)}")
    parser.add_argument("--output", help="write the table to this file")
    flags = parser.parse_args(args)
    unknown = [name for name in flags.names if name not in CONFIGURATIONS]
    if unknown:
        parser.error(f"{unknown[0]}: unknown; one of {'; '.join(CONFIGURATIONS)}")
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_vae(Path(folder))
        for name in flags.names or CONFIGURATIONS:
            checks.append(check(name, *settings(name, folder)))
            last = checks[-1]
            print(f"{last.name:28} {last.ratio:.5f}  worst phase {last.worst_phase[0]} {last.worst_phase[1]:.5f}  "
                  f"{last.seconds:.1f} s{'' if last.passed else '  OFF'}", flush=True)
    if flags.output:
        Path(flags.output).write_text(table(checks))
    return int(not all(each.passed for each in checks))


if __name__ == "__main__":
    run(main)
