#!/usr/bin/env python3
"""How many samples a second every data path makes, on one core, beside plain references measured in the same run.

    python scripts/benchmark_data.py [--images FOLDER] [--output benchmarks/data.md]

Rounds of the paths alternate and the best of each counts; rates are per second of processor time, so that a busy
machine changes them little. The line of the loader's worker also has its wall clock. Without --images, photographs-like
JPEGs of 400x533 are made. Takes two to three minutes.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dit import cli  # noqa: E402
from dit.codec import SD_VAE_CONFIG, build_codec  # noqa: E402
from dit.data import DigitsData, PositionDataset, SyntheticData, micro_batches  # noqa: E402
from dit.images import ImageData, ImageIndex, crop  # noqa: E402
from dit.latents import FORMAT, MANIFEST, LatentData, file_sha256, tensor_places  # noqa: E402
from dit.metrics_memory import measure_tensor_peak  # noqa: E402
from dit.packed_images import ArrowIndex, TarIndex  # noqa: E402
from dit.randomness import STREAM_NOISE, STREAM_POSTERIOR, normals, scalars  # noqa: E402

BATCH = 64
SHAPE = (4, 32, 32)
PIXELS = (256, 256)


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of class folders of photographs")
    parser.add_argument("--output", help="also write the table to this Markdown file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reads", type=int, default=100_000, help="reads of the memory check")
    flags = parser.parse_args(args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        latents = make_latents(Path(scratch) / "latents")
        images = flags.images or make_images(Path(scratch) / "images")
        rows = random_rows(flags.rounds) + latent_rows(latents, flags.rounds)
        rows += image_rows(images, Path(scratch), flags.rounds) + loader_rows(latents) + position_rows(latents)
        rows += memory_rows(latents, flags.reads) + vae_rows()
    text = table(rows)
    print(text)
    if flags.output:
        Path(flags.output).write_text(text, encoding="utf-8")


def best_rates(paths: dict[str, Callable[[int], object]], samples: int, rounds: int, repeats: int) -> dict[str, float]:
    """Samples per second of processor time, best of the rounds, the paths taking turns."""
    best = dict.fromkeys(paths, 0.0)
    for path in paths.values():
        path(0)
    for index in range(1, rounds + 1):
        for name, path in paths.items():
            start = time.process_time()
            for repeat in range(repeats):
                path(index * repeats + repeat)
            best[name] = max(best[name], samples * repeats / (time.process_time() - start))
    return best


def random_rows(rounds: int) -> list[tuple[str, str]]:
    generator, torch_generator = np.random.Generator(np.random.Philox(key=1)), torch.Generator()
    two = torch.empty(BATCH, 2, *SHAPE)
    rates = best_rates({
        "8,192 normals a sample: numpy's Philox `standard_normal`":
            lambda index: generator.standard_normal((BATCH, 2, *SHAPE), dtype=np.float32),
        "8,192 normals a sample: torch's generator": lambda index: two.normal_(generator=torch_generator),
        "8,192 normals a sample: by position (`dit.randomness`)":
            lambda index: [normals(0, stream, positions(index), SHAPE) for stream in (STREAM_NOISE, STREAM_POSTERIOR)],
    }, BATCH, rounds, 10)
    return [(name, f"{rate:,.0f} samples/s") for name, rate in rates.items()]


def latent_rows(root: Path, rounds: int) -> list[tuple[str, str]]:
    source = LatentData(root)
    dataset = PositionDataset(source, seed=0, noise_shape=SHAPE)
    shards = [root / shard["file"] for shard in source.manifest["shards"]]
    places = [tensor_places(path)["moments"] for path in shards]
    maps = [np.memmap(path, np.float16, "r", place[2], place[1]) for path, place in zip(shards, places)]
    size = len(maps[0])
    flips = scalars(0, positions(0), 1000, 0.1).flips

    def gather(index: int) -> np.ndarray:
        out = np.empty((BATCH, 8, 32, 32), dtype=np.float16)
        for row, image in enumerate(dataset.order(positions(index))):
            out[row] = maps[image // size][image % size, int(flips[row])]
        return out

    rates = best_rates({
        "moments by plain `np.memmap` gather": gather,
        "moments by `LatentData`": lambda index: source.read_moments(dataset.order(positions(index)), flips),
        "latents, whole sample (posterior sample, diffusion noise, time step, drop)":
            lambda index: dataset.__getitems__(positions(index)),
    }, BATCH, rounds, 10)
    rows = [(name, f"{rate:,.0f} samples/s") for name, rate in rates.items()]
    plain, ours = list(rates.values())[:2]
    return [*rows, ("time of `LatentData` without draws / plain gather", f"{plain / ours:.2f}")]


def image_rows(images: str | Path, scratch: Path, rounds: int) -> list[tuple[str, str]]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, Lambda, Normalize, RandomHorizontalFlip, ToTensor
    source = ImageData(ImageIndex(images), PIXELS)
    dataset = PositionDataset(source, seed=0, noise_shape=SHAPE)
    cut = Lambda(lambda image: crop(image, PIXELS, "center-crop", np.zeros(3)))
    normalize = Normalize([0.5] * 3, [0.5] * 3)
    theirs = ImageFolder(str(images), Compose([cut, RandomHorizontalFlip(), ToTensor(), normalize]))
    count = 16

    def indices(index: int) -> np.ndarray:
        return dataset.order(np.arange(index * count, (index + 1) * count))

    drawn = scalars(0, np.arange(count), 1000, 0.1)
    tars, arrow = packed(source.index, scratch)
    rates = best_rates({
        "JPEG folder at 256 px: torchvision's ImageFolder, same transforms":
            lambda index: torch.stack([theirs[i][0] for i in indices(index)]),
        "JPEG folder at 256 px: `--data folder`": lambda index: source.read(indices(index), drawn),
        "the same images in a tar: `--data webdataset`": lambda index: tars.read(indices(index), drawn),
        "the same images in an Arrow table: `--data hf`": lambda index: arrow.read(indices(index), drawn),
    }, count, rounds, 2)
    rows = [(name, f"{rate:,.0f} images/s") for name, rate in rates.items()]
    plain, ours = list(rates.values())[:2]
    other = {"digits": PositionDataset(DigitsData(), seed=0, noise_shape=(1, 8, 8)),
             "synthetic latents 4x32x32": PositionDataset(SyntheticData(SHAPE), seed=0, noise_shape=SHAPE)}
    more = best_rates({name: lambda index, made=made: made.__getitems__(positions(index))
                       for name, made in other.items()}, BATCH, rounds, 10)
    return [*rows, ("time of `--data folder` / ImageFolder", f"{plain / ours:.2f}"),
            *((f"{name}, whole sample", f"{rate:,.0f} samples/s") for name, rate in more.items())]


def packed(index: ImageIndex, scratch: Path) -> tuple[ImageData, ImageData]:
    """The images of a folder as WebDataset writes them and as Hugging Face's datasets does."""
    import datasets
    from webdataset import TarWriter
    os.environ["DIT_CACHE"] = str(scratch / "cache")
    files = [Path(index.path(i)).read_bytes() for i in range(len(index))]
    with TarWriter(str(scratch / "images.tar")) as tar:
        for i, content in enumerate(files):
            tar.write({"__key__": f"{i:06d}", "jpg": content, "cls": int(index.labels[i])})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=index.class_names)})
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None} for content in files],
                                "label": index.labels.tolist()}, features=features).save_to_disk(scratch / "arrow")
    return tuple(ImageData(made, PIXELS) for made in (TarIndex(str(scratch / "images.tar")),
                                                      ArrowIndex(scratch / "arrow")))


def vae_rows(count: int = 2) -> list[tuple[str, str]]:
    """The official VAEs' architecture with random weights, encoding in fp32 on one core."""
    codec = build_codec("ema", random_weights=True)
    x = torch.rand(count, 3, *PIXELS) * 2 - 1
    codec.encode(x)
    start = time.process_time()
    codec.encode(x)
    seconds = (time.process_time() - start) / count
    peak = measure_tensor_peak(lambda: codec.encode(x))[1].peak_bytes
    weights = sum(parameter.numel() * 4 for parameter in codec.vae.parameters())
    return [(f"SD-VAE encoding {count} images at 256 px in fp32", f"{seconds:.1f} s of processor time an image"),
            (f"its peak of tensors, of which weights {weights / 2**30:.2f} GiB", f"{peak / 2**30:.2f} GiB")]


def loader_rows(root: Path, rounds: int = 8, batches: int = 50) -> list[tuple[str, str]]:
    """One worker in its stride: what it makes per second of its own processor time, and what arrives; best rounds."""
    loader = micro_batches(PositionDataset(LatentData(root), seed=0, noise_shape=SHAPE), start_step=0,
                           global_batch=BATCH, num_workers=1)
    next(loader)
    worker = multiprocessing.active_children()[-1].pid
    made, arrived = 0.0, 0.0
    for _ in range(rounds):
        start, cpu = time.perf_counter(), processor_seconds(worker)
        for _ in range(batches):
            next(loader)
        made = max(made, batches * BATCH / (processor_seconds(worker) - cpu))
        arrived = max(arrived, batches * BATCH / (time.perf_counter() - start))
    loader.close()
    return [("latents, one worker, per second of its processor time", f"{made:,.0f} samples/s"),
            ("latents, one worker, arriving (wall clock)", f"{arrived:,.0f} samples/s")]


def processor_seconds(process: int) -> float:
    """Of all threads of a process so far."""
    return sum(int((task / "schedstat").read_text().split()[0])
               for task in Path(f"/proc/{process}/task").iterdir()) / 1e9


def position_rows(root: Path) -> list[tuple[str, str]]:
    start = time.perf_counter()
    loader = micro_batches(PositionDataset(LatentData(root), seed=0, noise_shape=SHAPE), start_step=10_000_000,
                           global_batch=BATCH, num_workers=1)
    next(loader)
    seconds = time.perf_counter() - start
    loader.close()
    return [("first micro-batch at step ten million (checksums, worker)", f"{seconds:.2f} s")]


def memory_rows(root: Path, reads: int) -> list[tuple[str, str]]:
    """Resident memory of this process, reading as a worker does."""
    dataset = PositionDataset(LatentData(root), seed=0, noise_shape=SHAPE)
    settle = min(reads, 10_000)
    for start in range(0, settle, BATCH):
        dataset.__getitems__(range(start, start + BATCH))
    before = resident_bytes()
    for start in range(settle, settle + reads, BATCH):
        dataset.__getitems__(range(start, start + BATCH))
    return [(f"growth of resident memory over {reads:,} reads", f"{(resident_bytes() - before) / 2**20:.1f} MiB")]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def positions(index: int) -> np.ndarray:
    return np.arange(index * BATCH, (index + 1) * BATCH)


def make_latents(root: Path, shards: int = 4, count: int = 2048) -> Path:
    """Shards of random moments of the official VAEs' size at 256 px, 256 MiB."""
    from safetensors.numpy import save_file
    root.mkdir()
    random, entries = np.random.default_rng(0), []
    for shard in range(shards):
        moments = random.standard_normal((count, 2, 8, 32, 32), dtype=np.float32)
        moments[:, :, 4:] -= 10
        path = root / f"shard-{shard:05d}.safetensors"
        save_file({"moments": moments.astype(np.float16), "labels": np.arange(count) % 1000,
                   "index": np.arange(count)}, path)
        entries.append({"file": path.name, "count": count, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
    manifest = {"format": FORMAT, "vae": {"name": "ema", "sha256": "", "config": SD_VAE_CONFIG},
                "class_names": [str(label) for label in range(1000)], "image_size": list(PIXELS),
                "latent_shape": list(SHAPE), "latent_std_overall": 1.0, "shards": entries}
    (root / MANIFEST).write_text(json.dumps(manifest))
    return root


def make_images(root: Path, count: int = 64) -> Path:
    from PIL import Image
    random = np.random.default_rng(0)
    for label in range(4):
        (root / str(label)).mkdir(parents=True)
        for index in range(count // 4):
            coarse = Image.fromarray(random.integers(0, 256, (40, 53, 3), dtype=np.uint8))
            coarse.resize((533, 400), Image.Resampling.BICUBIC).save(root / str(label) / f"{index}.jpg", quality=90)
    return root


def table(rows: list[tuple[str, str]]) -> str:
    lines = ["# Data paths", "", "`python scripts/benchmark_data.py`, per core; "
             f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} while measuring, "
             f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__.split('+')[0]}", "",
             "| path | measured |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows]) + "\n"


if __name__ == "__main__":
    cli.run(main)
