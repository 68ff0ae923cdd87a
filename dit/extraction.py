"""From an image folder to latent shards: resumable, the same bytes from any number of processes.

Each shard is the images [k * n, (k + 1) * n) of the sorted folder, encoded in batches that do not depend on who encodes
them, written beside and renamed, then described by `shard-k.json`. What has a description is done; what has none is
made again. When all are there they are summed up in `manifest.json`. Nothing in the files depends on time, process or
machine name.
"""
from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dit.codec import LOGVAR_RANGE, Codec
from dit.config import UsageError
from dit.images import ImageIndex, UnreadableImage, crop, decode, to_unit_range
from dit.latents import FORMAT, MANIFEST, file_sha256

SETTINGS = "extraction.json"
MAX_SHARDS = 512  # so many files a reader keeps open


@dataclass(frozen=True)
class Extraction:
    """What is extracted from where; everything that decides the bytes of the shards."""

    index: ImageIndex
    codec: Codec
    output: Path
    image_hw: tuple[int, int]
    augment: str
    batch_size: int
    shard_images: int = 0
    """Images per shard; 0: as many as make at most 512 shards, at least 512."""

    @property
    def images_per_shard(self) -> int:
        return self.shard_images or max(512, math.ceil(len(self.index) / MAX_SHARDS))

    @property
    def num_shards(self) -> int:
        return math.ceil(len(self.index) / self.images_per_shard)

    @property
    def moments_shape(self) -> tuple[int, ...]:
        """Of one image and its mirror image: (2, 2C, h, w)."""
        channels, *hw = self.codec.spec.latent_shape(self.image_hw)
        return 2, 2 * channels, *hw

    @property
    def planned_bytes(self) -> int:
        """Of all shards together, headers aside."""
        return len(self.index) * (2 * math.prod(self.moments_shape) + 16)

    def settings(self) -> dict[str, Any]:
        spec = self.codec.spec
        return {
            "format": FORMAT,
            "vae": {"name": spec.name, "sha256": self.codec.sha256, "config": dict(spec.vae_config),
                    "dtype": str(next(self.codec.vae.parameters()).dtype).removeprefix("torch.")},
            "image_size": list(self.image_hw), "latent_shape": list(spec.latent_shape(self.image_hw)),
            "augment": self.augment, "batch_size": self.batch_size, "images_per_shard": self.images_per_shard,
            "class_names": self.index.class_names, "num_images_listed": len(self.index),
            "listing_sha256": self.index.sha256(),
        }


def prepare(extraction: Extraction) -> list[int]:
    """Make the output folder or check that it belongs to this extraction; returns the shards that are still to be made.

    Raises UsageError if the folder holds something else, cannot be written, or the disk is too small.
    """
    output, settings = extraction.output, extraction.settings()
    try:
        output.mkdir(parents=True, exist_ok=True)
        if (output / SETTINGS).is_file():
            _check_same(output, _begun_with(output), settings)
        elif any(output.glob("shard-*")):
            raise UsageError(f"--output {output}: holds shards but no {SETTINGS}; give a new or empty folder")
        else:
            write_json(output / SETTINGS, settings)
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written ({error.strerror})") from error
    pending = [shard for shard in range(extraction.num_shards) if not _is_done(output, shard)]
    needed = extraction.planned_bytes * len(pending) // extraction.num_shards
    free = shutil.disk_usage(output).free
    if needed > free:
        raise UsageError(f"--output {output}: {needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free")
    return pending


def extract(extraction: Extraction, shards: list[int], *, num_workers: int = 0,
            progress: Callable[[int], None] = lambda done: None) -> None:
    """Make these shards; ``progress`` is told the number of images done after every batch."""
    batches = [(shard, indices) for shard in shards for indices in _batches(extraction, shard)]
    loader = DataLoader(_Images(extraction), batch_sampler=_Batches(batches), collate_fn=_as_is,
                        num_workers=num_workers, worker_init_fn=_one_thread)
    incoming = iter(loader)
    # On a CPU the last bit depends on how many threads share an operation, and torchrun gives each process one.
    # So every batch is encoded by one thread, and the threads take different batches.
    on_cpu = next(extraction.codec.vae.parameters()).device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 1
    with ThreadPoolExecutor(threads, initializer=_one_thread, initargs=(0,)) as pool:
        for shard in shards:
            parts, running = [], deque()
            for _ in _batches(extraction, shard):
                running.append(pool.submit(_encode, extraction, *next(incoming)))
                if len(running) > threads:
                    parts.append(_result(running, progress))
            while running:
                parts.append(_result(running, progress))
            _write_shard(extraction, shard, parts)


def finish(extraction: Extraction, wait: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Sum up all shards' descriptions in the manifest, delete what killed processes left half written, and return it.

    Waits for other processes' shards, calling ``wait(number missing)`` about once a second. Raises UsageError if no
    image was readable.
    """
    output = extraction.output
    while missing := [shard for shard in range(extraction.num_shards) if not _is_done(output, shard)]:
        assert wait is not None, f"shards {missing} are missing"
        wait(len(missing))
        time.sleep(1.0)
    descriptions = (_description(output, shard) for shard in range(extraction.num_shards))
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in descriptions]
    count = sum(part["count"] for part in parts)
    if not count:
        raise UsageError(f"--data-path {extraction.index.root}: none of its {len(extraction.index)} images can be read")
    sums = np.sum([part["sums"] for part in parts], axis=0)  # (3, C): mean, mean^2, variance
    values = 2 * count * math.prod(extraction.moments_shape[2:])
    mean, square, variance = sums / values
    spread = np.sqrt(square - mean**2 + variance)
    spec = extraction.codec.spec
    scale, shift = np.broadcast_to(spec.scale, mean.shape), np.broadcast_to(spec.shift, mean.shape)
    latent_mean, latent_std = (mean - shift) * scale, spread * scale
    overall = math.sqrt(np.mean(latent_std**2 + latent_mean**2) - np.mean(latent_mean) ** 2)
    manifest = extraction.settings() | {
        "moments": "mean and log-variance as the VAE gives them, float16; axis 1: plain, mirrored",
        "num_images": count,
        "images_per_class": np.sum([part["labels"] for part in parts], axis=0).tolist(),
        "num_unreadable": sum(len(part["unreadable"]) for part in parts),
        "unreadable": [entry for part in parts for entry in part["unreadable"]],
        "latent_mean": latent_mean.tolist(), "latent_std": latent_std.tolist(), "latent_std_overall": overall,
        "shards": [{name: part[name] for name in ("file", "count", "bytes", "sha256")}
                   for part in parts if part["count"]],
    }
    write_json(output / MANIFEST, manifest)
    for left_over in output.glob(".shard-*"):  # by processes that were killed while they wrote
        left_over.unlink(missing_ok=True)
    return manifest


def _as_is(batch: tuple) -> tuple:
    return batch


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


class _Images(Dataset):
    """Decoded batches: (uint8 (n, H, W, 3), the indices read, [(index, reason)] of those not)."""

    def __init__(self, extraction: Extraction):
        self.index, self.image_hw, self.augment = extraction.index, extraction.image_hw, extraction.augment

    def __getitems__(self, indices: range):
        pixels, kept, broken = [], [], []
        for index in indices:
            try:
                image = decode(self.index.path(index))
                pixels.append(np.asarray(crop(image, self.image_hw, self.augment, np.zeros(3))))
                kept.append(index)
            except UnreadableImage as error:
                broken.append((index, str(error)))
        array = np.stack(pixels) if pixels else np.empty((0, *self.image_hw, 3), np.uint8)
        return torch.from_numpy(array), kept, broken


class _Batches:
    def __init__(self, batches: list[tuple[int, range]]):
        self.batches = batches

    def __iter__(self) -> Iterator[range]:
        return (indices for _, indices in self.batches)


def _batches(extraction: Extraction, shard: int) -> list[range]:
    start = shard * extraction.images_per_shard
    stop = min(start + extraction.images_per_shard, len(extraction.index))
    return [range(at, min(at + extraction.batch_size, stop)) for at in range(start, stop, extraction.batch_size)]


def _result(running: deque, progress: Callable[[int], None]) -> tuple:
    part = running.popleft().result()
    progress(len(part[1]) + len(part[2]))
    return part


def _encode(extraction: Extraction, pixels: torch.Tensor, kept: list[int],
            broken: list[tuple[int, str]]) -> tuple[np.ndarray, list[int], list[tuple[int, str]]]:
    """Moments (n, 2, 2C, h, w) float16 of a batch."""
    moments = np.empty((len(kept), *extraction.moments_shape), dtype=np.float16)
    if kept:
        device = next(extraction.codec.vae.parameters()).device
        x = torch.from_numpy(to_unit_range(pixels.numpy())).to(device)
        both = torch.stack([extraction.codec.encode_moments(image) for image in (x, x.flip(-1))], dim=1)
        mean, logvar = both.chunk(2, dim=2)
        both = torch.cat([mean, logvar.clamp(*LOGVAR_RANGE)], dim=2).half()
        if not torch.isfinite(both).all():
            first = extraction.index.relative_path(kept[0])
            raise UsageError(f"--vae {extraction.codec.spec.name}: its moments are not finite in half precision for "
                             f"the images from {first} on; extract with --dtype fp32")
        moments[:] = both.cpu().numpy()
    return moments, kept, broken


def _write_shard(extraction: Extraction, shard: int, parts: list) -> None:
    from safetensors.numpy import save
    moments = np.concatenate([part[0] for part in parts])
    kept = np.array([index for part in parts for index in part[1]], dtype=np.int64)
    labels = extraction.index.labels[kept]
    path = extraction.output / f"shard-{shard:05d}.safetensors"
    tensors = {"moments": moments, "labels": labels, "index": kept}
    write_atomically(path, save(tensors, metadata={"format": FORMAT}))  # one key: several come in any order
    channels = moments.shape[2] // 2
    mean, logvar = moments[:, :, :channels].astype(np.float64), moments[:, :, channels:].astype(np.float64)
    axes = (0, 1, 3, 4)
    write_json(_description(extraction.output, shard), {
        "file": path.name, "count": len(kept), "bytes": path.stat().st_size, "sha256": file_sha256(path),
        "labels": np.bincount(labels, minlength=max(1, len(extraction.index.class_names))).tolist(),
        "sums": [mean.sum(axes).tolist(), (mean**2).sum(axes).tolist(), np.exp(logvar).sum(axes).tolist()],
        "unreadable": [{"path": extraction.index.relative_path(index), "reason": reason} for part in parts
                       for index, reason in part[2]],
    })


def _description(output: Path, shard: int) -> Path:
    return output / f"shard-{shard:05d}.json"


def _is_done(output: Path, shard: int) -> bool:
    """A description is written last, so where it is and the shard has its size, both are whole."""
    try:
        part = json.loads(_description(output, shard).read_text(encoding="utf-8"))
        return (output / part["file"]).stat().st_size == part["bytes"]
    except (OSError, ValueError, KeyError):
        return False


def _begun_with(output: Path) -> dict[str, Any]:
    try:
        before = json.loads((output / SETTINGS).read_text(encoding="utf-8"))
        return before | {"vae": dict(before["vae"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--output {output}: {SETTINGS} cannot be read ({error}); "
                         "give a new or empty folder") from None


def _check_same(output: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for kind in (before, now):  # the same VAE may lie elsewhere now
        kind["vae"] = {name: kind["vae"].get(name) for name in ("sha256", "dtype")}
    for name, value in now.items():
        if before.get(name) != value:
            shown = "" if name in ("vae", "listing_sha256") else f" ({before.get(name)} before, {value} now)"
            raise UsageError(f"--output {output}: was begun with another {name.replace('_', ' ')}{shown}; "
                             "give the same flags and images to go on, or another folder")


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also after a power cut; a full disk leaves nothing behind."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"--output {path.parent}: {path.name} cannot be written ({error.strerror})") from error
