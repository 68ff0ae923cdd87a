#!/usr/bin/env python3
"""Measure what this device really does, so that plans for it say seconds and not hopes.

    python scripts/calibrate.py            # under a minute on two CPU cores; about two on a GPU
    python scripts/calibrate.py --quick    # about 20 seconds: enough for small models in fp32
    python scripts/calibrate.py --threads 1    # for several processes on one CPU: torchrun gives each one thread

Times single operations (matrix products, attention, convolutions) and the steps of a few small models, none of which is
a model that a plan is judged on. The result is kept in the user's cache, under the device, torch's version and the
threads; --force measures again. A quick one never replaces a full one without it. Close other programs first.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dit import cli  # noqa: E402
from dit.config import TrainConfig  # noqa: E402
from dit.planner import calibration  # noqa: E402
from dit.planner.op_class import Work, attention_flops  # noqa: E402

# width, depth, heads, tokens, batch, other settings. The first one is all overhead; the others span the caches.
QUICK_STEPS = (
    (32, 4, 2, 4, 4, {}), (64, 2, 2, 16, 96, {}), (96, 2, 3, 16, 192, {}), (192, 1, 4, 64, 32, {"grad_accum": 2}),
    (256, 1, 4, 64, 48, {}), (192, 1, 3, 64, 12, {"attention": "math"}))
FULL_STEPS = (
    *QUICK_STEPS, (160, 3, 5, 16, 24, {}), (384, 1, 6, 256, 8, {}), (768, 1, 12, 64, 12, {}), (64, 2, 4, 64, 16, {}),
    (320, 3, 5, 4, 6, {"optimizer": "adamw-foreach"}),
    (384, 1, 6, 16, 32, {"attention": "math"}),
    (96, 2, 3, 16, 24, {"amp": True, "amp_dtype": "bf16"}), (256, 1, 4, 64, 4, {"amp": True, "amp_dtype": "bf16"}))
PASSES = 3
WIDTHS, ROWS = (64, 128, 256, 512, 1024), (4, 16, 64, 256, 1024, 4096)
ATTENTION_TOKENS, HEAD_SIZES = (4, 16, 64, 256, 1024), (16, 32, 48, 64, 72)


def main(args: list[str]) -> None:
    flags = parse(args)
    import torch

    if flags.threads:
        torch.set_num_threads(flags.threads)
    on_gpu = torch.cuda.is_available() and not flags.threads
    name, threads = (present_gpu().name, None) if on_gpu else (calibration.cpu_name(), torch.get_num_threads())
    path = calibration.path_of(name, threads)
    found = calibration.load(path)
    if found and not flags.force and (flags.quick or "quick" not in found.source):
        print(f"already calibrated: {found.source}\n{path}\n--force measures again")
        return
    started = time.perf_counter()
    result = calibrate_gpu(Progress()) if on_gpu else calibrate_cpu(name, threads, flags.quick, Progress())
    calibration.save(result, path)
    print(f"\r\033[K{result.source}: {sum(map(len, result.rows.values()))} measurements in "
          f"{time.perf_counter() - started:.0f} s")
    for step, residual in result.residuals.items():
        print(f"  {step:44s} predicted from the others {100 * residual:+5.1f} %")
    print(f"a plan's interval: {100 * result.spread:.0f} % to either side; kept in {path}")


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="calibrate.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about 20 seconds instead of a minute")
    parser.add_argument("--force", action="store_true", help="measure again although there is a calibration")
    parser.add_argument("--threads", type=int, default=0,
                        help="measure the CPU with so many threads; default: the GPU, or torch's own choice")
    return parser.parse_args(args)


class Progress:
    """One line that says what is being measured; on a terminal it is written over."""

    def __call__(self, done: int, total: int, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K[{done}/{total}] {what}", end="", file=sys.stderr, flush=True)


def calibrate_cpu(name: str, threads: int, quick: bool,
                  progress: Callable[[int, int, str], None]) -> calibration.Calibration:
    """Measure and fit. ``threads`` is for the record; torch must have been told already."""
    from importlib.metadata import version

    from dit.planner.micro_benchmarks import gloo_rates, merged, time_step

    plans = QUICK_STEPS if quick else FULL_STEPS
    total, steps, singles = PASSES * (len(plans) + 2), defaultdict(list), []
    for turn in range(PASSES):  # a busy minute spoils one pass, not one figure
        for index, (width, depth, heads, tokens, batch, changes) in enumerate(plans):
            extras = "".join(f" {value}" for value in changes.values() if isinstance(value, str))
            label = f"width {width} depth {depth} tokens {tokens} batch {batch}{extras}"
            progress(turn * (len(plans) + 2) + index, total, label)
            config = _reference(width, depth, heads, tokens, batch, changes)
            steps[label].append(time_step(label, config, repeats=2))
        progress((turn + 1) * (len(plans) + 2) - 2, total, "matrix products, attention, convolutions")
        singles += _gemms(quick) + _attention(quick) + _batched(quick) + _convolutions(quick)
    source = (f"measured on {name}, {threads} threads, torch {version('torch')}, {time.strftime('%Y-%m-%d')}, "
              f"{'quick' if quick else 'full'}")
    exchange = gloo_rates() if threads == 1 else {}  # what torchrun's processes do on one CPU
    return calibration.fit(source, [merged(passes) for passes in steps.values()], singles, _data() | exchange)


# width, depth, heads, tokens, batch, other settings: large enough for the host to run ahead of the device.
GPU_STEPS = (
    (768, 2, 12, 256, 64, {"amp": True}), (1024, 2, 16, 256, 32, {"amp": True}), (1024, 2, 16, 256, 32, {}),
    (768, 2, 12, 64, 128, {"amp": True, "attention": "math"}), (1280, 2, 16, 1024, 8, {"amp": True}))
GPU_HOST_STEP = (256, 12, 4, 16, 2, {"amp": True})  # all host


def present_gpu():
    """The catalogue's entry of the first GPU. Raises UsageError where it is not in the catalogue."""
    import torch

    from dit.planner.hardware import find_device

    return find_device(torch.cuda.get_device_name(0))


def calibrate_gpu(progress: Callable[[int, int, str], None]) -> calibration.Calibration:
    """Factors of this GPU over the catalogue's priors, per class of operation and for the host."""
    import torch

    from dit.planner import priors
    from dit.planner.micro_benchmarks import time_gpu_step
    from dit.planner.op_class import works

    device = present_gpu()
    rates = priors.rates(device, tf32=True)
    steps = []
    for index, (width, depth, heads, tokens, batch, changes) in enumerate((*GPU_STEPS, GPU_HOST_STEP)):
        progress(index, len(GPU_STEPS) + 1, f"width {width} tokens {tokens} batch {batch}")
        config = _reference(width, depth, heads, tokens, batch, changes)
        ops, seconds, host, _ = time_gpu_step(config)
        each = works(ops)
        prior = [priors.device_seconds(work, rates)[0] for work in each]
        steps.append(([work.cls for work in each], seconds, prior, host,
                      sum(priors.host_seconds(work, op.phase) for work, op in zip(each, ops, strict=True))))
    *large, tiny = steps
    factors = _gpu_factors(large) | {"dispatch": tiny[3] / tiny[4]}
    residuals = {}
    for index, ((width, _, _, tokens, batch, _), step) in enumerate(zip(GPU_STEPS, large, strict=True)):
        others = _gpu_factors([other for other in large if other is not step])
        planned = sum(p * others.get(c, 1.0) for c, p in zip(step[0], step[2], strict=True))
        residuals[f"{index}: width {width} tokens {tokens} batch {batch}"] = planned / sum(step[1]) - 1
    typical = sorted(abs(value) for value in residuals.values())[len(residuals) // 2]
    source = (f"measured on {device.name}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
              f"{time.strftime('%Y-%m-%d')}")
    return calibration.Calibration("measured", source, factors=factors, residuals=residuals,
                                   spread=max(calibration.SPREAD_FLOOR, 2 * typical))


def _gpu_factors(steps: list[tuple]) -> dict[str, float]:
    """Fitted to operations that last longer than the launch of one."""
    rows = [row for step in steps for row in zip(*step[:3], strict=True) if row[2] > 2e-5]
    return calibration.fit_factors(*zip(*rows, strict=True))


def _reference(width: int, depth: int, heads: int, tokens: int, batch: int, changes: dict[str, object]) -> TrainConfig:
    from dit.planner.micro_benchmarks import reference_config

    return reference_config(TrainConfig(), width=width, depth=depth, heads=heads, tokens=tokens, batch=batch, **changes)


def _gemms(quick: bool) -> list[tuple[Work, float]]:
    import torch

    from dit.planner.micro_benchmarks import Pool, gemm_call, time_call

    found = []
    for dtype, largest in ((torch.float32, 6e8 if quick else 2e9), (torch.bfloat16, 2e7 if quick else 1e8)):
        widths = WIDTHS if dtype is torch.float32 else WIDTHS[1::2]
        pool = Pool(dtype)
        for width in widths:
            for rows in ROWS:
                for out, into in ((width, width), (4 * width, width), (width, 4 * width)):
                    for layout in ("nt", "nn", "tn"):
                        m, n, k = (rows, out, into) if layout != "tn" else (out, into, rows)
                        if 2 * m * n * k > largest:
                            continue
                        seconds = time_call(gemm_call(layout, m, n, k, pool), budget=0.004 if quick else 0.006)
                        size = (float(m), float(n), float(k))
                        found.append((Work(f"gemm {layout} {str(dtype)[6:]}", "gemm", size, 2 * m * n * k, 0), seconds))
    return found


def _attention(quick: bool) -> list[tuple[Work, float]]:
    import torch

    from dit.planner.micro_benchmarks import Pool, attention_calls, time_call

    found = []
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    for dtype in (torch.float32, torch.bfloat16):
        pool = Pool(dtype)
        for tokens in ATTENTION_TOKENS[:4] if quick else ATTENTION_TOKENS:
            for head_size in HEAD_SIZES if dtype is torch.float32 else HEAD_SIZES[1::2]:
                rows = max(4, 2**17 // (tokens * head_size))
                calls = attention_calls(rows, tokens, head_size, pool)
                size = (float(rows), float(tokens), float(head_size))
                kinds = (("", "attention forward"), ("_backward", "attention backward"))
                for call, (suffix, cls) in zip(calls, kinds, strict=True):
                    work = Work(f"{kernel}{suffix} {str(dtype)[6:]}", cls, size, attention_flops(size, bool(suffix)), 0)
                    found.append((work, time_call(call, budget=0.008 if quick else 0.012)))
    return found


def _batched(quick: bool) -> list[tuple[Work, float]]:
    """Products of unfused attention: scores, their values, and the gradients' three shapes."""
    import torch

    from dit.planner.micro_benchmarks import Pool, bmm_call, time_call

    found, pool = [], Pool(torch.float32)
    for tokens in (16, 64, 256):
        for head_size in (32, 64):
            batch = max(4, 2**20 // (tokens**2 * (4 if quick else 1)))
            for m, n, k in ((tokens, tokens, head_size), (tokens, head_size, tokens), (head_size, tokens, tokens)):
                size = (float(batch), float(m), float(n), float(k))
                work = Work("bmm float32", "batched gemm", size, 2 * batch * m * n * k, 0)
                found.append((work, time_call(bmm_call(batch, m, n, k, pool), budget=0.01)))
    return found


def _convolutions(quick: bool) -> list[tuple[Work, float]]:
    """3 x 3 convolutions as a VAE's encoder has them."""
    import torch

    from dit.planner.micro_benchmarks import time_call

    found = []
    for channels, side, batch in ((128, 32, 1), (128, 64, 1), (256, 32, 2)) if quick else (
            (128, 32, 1), (128, 64, 1), (128, 128, 1), (256, 32, 2), (256, 64, 1), (512, 32, 2), (512, 16, 4)):
        image, weight = torch.randn(batch, channels, side, side), torch.randn(channels, channels, 3, 3)
        flops = 2 * batch * side**2 * channels**2 * 9
        work = Work("convolution general float32", "convolution", (float(flops),), flops, 0)
        found.append((work, time_call(partial(torch.nn.functional.conv2d, image, weight, padding=1), budget=0.025)))
    return found


def _data() -> dict[str, float]:
    """Seconds that the loader's arithmetic takes per micro-batch, per sample and per number drawn."""
    import numpy as np

    from dit.data import PositionDataset, SyntheticData
    from dit.planner.micro_benchmarks import time_call

    rows = []
    for samples, shape in ((1, (1, 4, 4)), (64, (1, 8, 8)), (256, (1, 8, 8)), (32, (4, 32, 32)), (128, (4, 16, 16))):
        dataset = PositionDataset(SyntheticData(shape, 10), seed=0, noise_shape=shape)
        positions = np.arange(samples)
        seconds = time_call(lambda d=dataset, p=positions: d.__getitems__(p))
        rows.append((1 / seconds, samples / seconds, samples * int(np.prod(shape)) / seconds))
    table = np.array(rows)
    per_batch, per_sample, per_number = calibration.non_negative(table, np.ones(len(rows)))
    return {"per_batch": float(per_batch), "per_sample": float(per_sample), "per_number": float(per_number)}


if __name__ == "__main__":
    cli.run(main)
