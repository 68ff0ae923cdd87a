"""The run's samples, addressed by position: micro-batches for any rank, made in the loader's workers.

A position is the index of a sample in the run's endless shuffled sequence. Everything about a sample (which image,
crop, flip, VAE noise, time step, diffusion noise, label drop) is a function of (seed, position), so the loss does not
depend on the number of devices, the micro-batch or the step a run was resumed at, and a resume needs no generator
state.

A source has `num_samples`, `num_classes` (0: unlabelled), `class_names`, `sample_shape` (C, H, W), `holds_moments` and
`read(indices, scalars, posterior_noise) -> x (N, *sample_shape) float32, y (N,) int64`; one that can meet broken files
also has `unreadable`, {path: reason}.
"""
from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dit.config import IMAGE_DATA, TrainConfig, UsageError
from dit.images import ImageData, ImageIndex
from dit.latents import LatentData, read_manifest
from dit.packed_images import ArrowIndex, TarIndex
from dit.randomness import (
    STREAM_NOISE,
    STREAM_POSTERIOR,
    STREAM_SYNTHETIC,
    EndlessOrder,
    normals,
    scalars,
)

logger = logging.getLogger(__name__)


class LoaderError(RuntimeError):
    """A worker died or met a defect; the message is one line that says where."""

    exit_code = 6


class DigitsData:
    """scikit-learn's 1,797 handwritten digits: (1, 8, 8) in [-1, 1], ten classes, never mirrored."""

    num_classes = 10
    sample_shape = (1, 8, 8)
    holds_moments = False

    def __init__(self):
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError("--data digits: scikit-learn is not installed; pip install scikit-learn") from error
        digits = load_digits()
        self._x = np.ascontiguousarray((digits.images / 8.0 - 1.0)[:, None], dtype=np.float32)  # ink 0..16
        self._y = digits.target.astype(np.int64)
        self.num_samples = len(self._y)
        self.class_names = [str(digit) for digit in range(10)]

    def read(self, indices, scalars, posterior_noise=None):
        return self._x[indices], self._y[indices]


class SyntheticData:
    """Samples of any shape for measuring: unit normal, nothing decoded. Sample i is a window of one fixed pool of
    normals.
    """

    holds_moments = False
    _POOL = 1 << 20

    def __init__(self, sample_shape: tuple[int, int, int], num_classes: int = 1000, num_samples: int = 1_281_167):
        if num_samples <= 0 or min(sample_shape) <= 0:
            raise UsageError(f"--data synthetic: {num_samples} samples of shape {tuple(sample_shape)}; "
                             "all must be positive")
        self.sample_shape, self.num_classes, self.num_samples = tuple(sample_shape), num_classes, num_samples
        self.class_names = [f"class {label}" for label in range(num_classes)]
        self._size = math.prod(sample_shape)
        blocks = np.arange(-(-(self._POOL + self._size) // 4096))
        self._pool = normals(0, STREAM_SYNTHETIC, blocks, (4096,)).reshape(-1)

    def read(self, indices, scalars, posterior_noise=None):
        indices = np.asarray(indices, dtype=np.int64)
        starts = (indices * 0x9E3779B1) % self._POOL  # Knuth's multiplicative hash spreads neighbours over the pool
        x = np.stack([self._pool[start:start + self._size] for start in starts])
        labels = indices % max(1, self.num_classes)
        return x.reshape(len(indices), *self.sample_shape), labels


class PositionDataset(Dataset):
    """Whole micro-batches by position; see the module's docstring.

    `noise_shape` is the latents' shape; `needs_posterior_noise` is set where a VAE encodes on the device; a source that
    holds moments takes that noise itself. `num_classes` is the model's: labels outside [0, num_classes) are refused
    here, on the host, where a message can name them (0: unconditional, every label is 0).
    """

    def __init__(self, source, *, seed: int, noise_shape: tuple[int, int, int], num_classes: int | None = None,
                 num_timesteps: int = 1000, class_dropout_prob: float = 0.1, flip: bool = True,
                 needs_posterior_noise: bool = False):
        self.source, self.seed, self.noise_shape = source, seed, tuple(noise_shape)
        self.num_classes = source.num_classes if num_classes is None else num_classes
        self.num_timesteps, self.class_dropout_prob = num_timesteps, class_dropout_prob
        self.flip, self.needs_posterior_noise = flip, needs_posterior_noise
        if self.num_classes and source.num_classes > self.num_classes:
            raise UsageError(f"--num-classes {self.num_classes}: the data has {source.num_classes} classes, "
                             f"labels 0 to {source.num_classes - 1}; give at least {source.num_classes}")
        if source.holds_moments and source.sample_shape != self.noise_shape:
            raise UsageError(f"--data latents: the model is shaped for latents of {self.noise_shape}, the data has "
                             f"{source.sample_shape}; check --image-size, --vae and --latent-channels")
        self.order = EndlessOrder(source.num_samples, seed)

    @property
    def notes(self) -> list[str]:
        """What the user should know at the start, in lines."""
        if not 0 < self.source.num_classes < self.num_classes:
            return []
        return [f"the data has {self.source.num_classes} classes and --num-classes is {self.num_classes}: the others "
                "are never trained"]

    def __len__(self) -> int:
        return self.source.num_samples

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in self.__getitems__([position]).items()}

    def __getitems__(self, positions) -> dict[str, torch.Tensor]:
        """The micro-batch of these positions: x, y, t, noise, drop and, where a VAE is in the loop, posterior_noise."""
        positions = np.asarray(positions, dtype=np.int64)
        drawn = scalars(self.seed, positions, self.num_timesteps, self.class_dropout_prob)
        drawn = drawn._replace(flips=drawn.flips & self.flip)
        posterior = None
        if self.needs_posterior_noise or self.source.holds_moments:
            posterior = normals(self.seed, STREAM_POSTERIOR, positions, self.noise_shape)
        x, y = self.source.read(self.order(positions), drawn, posterior)
        if not self.num_classes:
            y = np.zeros_like(y)
        elif len(y) and not 0 <= y.min() <= y.max() < self.num_classes:
            outside = y.min() if y.min() < 0 else y.max()
            raise UsageError(f"--num-classes {self.num_classes}: the data has label {outside}; "
                             f"labels must be in [0, {self.num_classes})")
        noise = normals(self.seed, STREAM_NOISE, positions, self.noise_shape)
        batch = {"x": x, "y": y, "t": drawn.timesteps, "drop": drawn.drops, "noise": noise}
        if self.needs_posterior_noise:
            batch["posterior_noise"] = posterior
        return {name: torch.from_numpy(value) for name, value in batch.items()}


def open_source(config: TrainConfig):
    """The source that --data names. Raises UsageError where it is missing, empty or of another kind than the settings
    say.
    """
    data, num_classes = config.data, config.model.num_classes
    if data.data == "digits":
        return DigitsData()
    if data.data == "synthetic":
        return SyntheticData(config.latent_shape, num_classes)
    if data.data == "latents":
        return LatentData(data.data_path, config.image_hw, vae=data.vae, num_classes=num_classes)
    assert data.data in IMAGE_DATA, data.data
    return ImageData(_image_index(config), config.image_hw, augment=data.augment)


def _image_index(config: TrainConfig, first_part: bool = False):
    """The images of --data-path; with `first_part` a part that is found at once, for measuring."""
    data, labelled = config.data, config.model.num_classes > 0
    if data.data == "webdataset":
        return TarIndex(data.data_path, labelled, max_tars=int(first_part))
    if data.data == "hf":
        return ArrowIndex(data.data_path, labelled)
    if not (first_part and labelled):
        return ImageIndex(data.data_path, labelled, data.classes_file)
    with os.scandir(data.data_path) as entries:
        folders = sorted(entry.path for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return ImageIndex(folders[0] if folders else data.data_path, labelled=False)


def build_dataset(config: TrainConfig) -> PositionDataset:
    """The run's dataset. Raises UsageError as `open_source`, and where the data has more classes than --num-classes."""
    return _dataset(config, open_source(config), config.model.num_classes)


def _dataset(config: TrainConfig, source, num_classes: int | None) -> PositionDataset:
    return PositionDataset(
        source, seed=config.run.global_seed, noise_shape=config.latent_shape, num_classes=num_classes,
        class_dropout_prob=config.shape.class_dropout_prob, flip=config.data.flip,
        needs_posterior_noise=config.encodes_in_loop,
    )


def position_ranges(*, start_step: int, global_batch: int, accumulation: int, rank: int,
                    world_size: int) -> Iterator[range]:
    """This rank's micro-batches, endlessly from the first of `start_step`.

    Micro-batch a of rank r in step s holds the positions s * global_batch + (a * world_size + r) * micro + [0, micro).
    """
    assert global_batch % (accumulation * world_size) == 0 and 0 <= rank < world_size
    micro = global_batch // (accumulation * world_size)
    step = start_step
    while True:
        for index in range(accumulation):
            start = step * global_batch + (index * world_size + rank) * micro
            yield range(start, start + micro)
        step += 1


class _Reported(Dataset):
    """What workers run: failures come back as values, because DataLoader would re-raise them as a page of traceback."""

    def __init__(self, dataset: PositionDataset):
        self.dataset = dataset

    def __getitems__(self, positions: range):
        try:
            batch = self.dataset.__getitems__(positions)
        except UsageError as error:
            return UsageError, str(error), {}
        except Exception as error:  # noqa: BLE001 - whatever it is, it must cross the process boundary as one line
            where = f"positions {positions.start} to {positions.stop - 1}"
            return LoaderError, f"loader failed at {where}: {type(error).__name__}: {error}".splitlines()[0], {}
        unreadable = getattr(self.dataset.source, "unreadable", {})
        report = dict(unreadable)
        unreadable.clear()
        return None, batch, report


def _as_is(value):
    return value


def _start_worker(_worker: int) -> None:
    torch.set_num_threads(1)  # workers are the parallelism; more threads each would only compete
    # Ctrl-C and a scheduler's SIGTERM reach every process of the job. The trainer needs its workers to finish the step
    # and save; it ends them itself, and a second SIGTERM, as multiprocessing's exit sends one, is obeyed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class MicroBatches:
    """Endless iterator of one rank's micro-batches; `unreadable` collects {path: reason} of the files replaced so
    far.
    """

    MAX_WARNINGS = 20

    def __init__(self, dataset: PositionDataset, ranges, num_workers: int, pin_memory: bool, prefetch: int):
        self.unreadable: dict[str, str] = {}
        loader = DataLoader(
            _Reported(dataset), batch_sampler=ranges, collate_fn=_as_is, num_workers=num_workers, pin_memory=pin_memory,
            prefetch_factor=prefetch if num_workers else None, worker_init_fn=_start_worker,
        )
        self._batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        try:
            failure, batch, report = next(self._batches)
        except RuntimeError as error:  # a killed worker, or no shared memory left
            reason = str(error).splitlines()[0]
            raise LoaderError(f"a loader worker ended ({reason}); out of host or shared memory? "
                              "try a lower --num-workers") from error
        if failure is not None:
            raise failure(batch)
        for path, reason in report.items():
            self._note(path, reason)
        return batch

    def _note(self, path: str, reason: str) -> None:
        if path in self.unreadable:
            return
        self.unreadable[path] = reason
        count = len(self.unreadable)
        if count <= self.MAX_WARNINGS:
            tail = "; further ones are only counted" if count == self.MAX_WARNINGS else ""
            logger.warning("unreadable image %d, replaced by the next one: %s (%s)%s", count, path, reason, tail)

    def close(self) -> None:
        """Ends the workers."""
        self._batches = iter(())


def micro_batches(dataset: PositionDataset, *, start_step: int, global_batch: int, accumulation: int = 1,
                  rank: int = 0, world_size: int = 1, num_workers: int = 0, pin_memory: bool = False,
                  prefetch: int = 2) -> MicroBatches:
    """Endless micro-batches (dicts of CPU tensors, see PositionDataset) of one rank, from `start_step` on.

    Raises, with one line: UsageError for a mistake in the data, LoaderError when a worker ends or fails otherwise.
    """
    ranges = position_ranges(start_step=start_step, global_batch=global_batch, accumulation=accumulation, rank=rank,
                             world_size=world_size)
    return MicroBatches(dataset, ranges, num_workers, pin_memory, prefetch)


# ---- for the plan ----

def measured_rate(dataset: PositionDataset, micro_batch: int, seconds: float = 1.0) -> float:
    """Samples per second that one worker makes on one core of this machine, by making them here for ``seconds``.

    Without the transfer to the training process; divide what the step consumes by it for the number of workers.
    """
    dataset.__getitems__(range(micro_batch))  # opens files
    start, made = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        made += micro_batch
        dataset.__getitems__(range(made, made + micro_batch))
    return made / elapsed


def worker_rate(config: TrainConfig, seconds: float = 0.5) -> float | None:
    """Samples per second that one worker makes of the run's own data, on this machine; see `measured_rate`.

    None where the data is not here or needs no reading. Images are taken from a part of the data that is found at once:
    listing millions of files would take longer than the rest of the plan. Raises UsageError as `open_source`.
    """
    data = config.data
    if not _has_files(config):
        return None
    if data.data == "latents":
        return measured_rate(build_dataset(config), 64, seconds)
    source = ImageData(_image_index(config, first_part=True), config.image_hw, augment=data.augment)
    return measured_rate(_dataset(config, source, None), 4, seconds)


def sample_count(config: TrainConfig) -> int | None:
    """Samples in the run's own data, for the length of the run; None where the data is not here or has no files.

    A folder's images are listed, as they are at the start of the run: seconds for each million. Raises UsageError as
    `open_source`.
    """
    if not _has_files(config):
        return None
    if config.data.data == "latents":
        return sum(shard["count"] for shard in read_manifest(config.data.data_path)["shards"])
    return len(_image_index(config).labels)


def _has_files(config: TrainConfig) -> bool:
    path = config.data.data_path
    return config.data.data in (*IMAGE_DATA, "latents") and bool(path) and _is_here(path)


def _is_here(path: str) -> bool:
    return os.path.exists(path) or "{" in path and os.path.isdir(os.path.dirname(path.split("{")[0]) or ".")
