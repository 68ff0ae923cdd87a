"""A run is a folder that explains itself: its name, its settings, its environment, its lock."""

import contextlib
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from dit.config import SECTION_OF, RunConfig, TrainConfig, UsageError, flag
from dit.config_files import from_tree
from dit.parallel import Ranks

FIXED_AT_RESUME = ("model", "image_size", "num_classes", "depth", "hidden_size", "num_heads", "patch_size",
                   "learn_sigma", "data", "classes_file", "global_seed", "ema")
"""Settings that a run keeps for its whole life: with another value its weights, its labels or its positions in the data
would mean something else."""
HARMLESS_AT_RESUME = ("data_path", "vae", "augment", "flip", "class_dropout_prob", "global_batch_size", "optimizer")
"""Settings with which a run can be continued as another one, if that is what its user wants (--resume-anyway)."""
_PACKAGES = ("torch", "torchvision", "timm", "diffusers", "accelerate", "numpy", "safetensors")


class RunFolder:
    """The folder of one run: config.json, environment.json, classes.json, plan.json, metrics.jsonl, checkpoints/,
    samples/.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.metrics = path / "metrics.jsonl"
        self.plan = path / "plan.json"

    def lock(self) -> None:
        """Keep a second job out of this folder. The lock ends with the process, however it ends. Raises UsageError.

        A record lock, which children do not inherit: loader workers outlive a killed trainer by some seconds.
        """
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            raise UsageError(f"--run-dir {self.path}: in use by {holder}; stop it, or choose another folder") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file whole or not at all. Raises UsageError where the disk is full or read-only."""
        path = self.path / name
        temporary = path.with_name(f".{name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"could not write {path}: {error.strerror}") from None

    def keep_classes(self, names: list[str], anyway: bool = False) -> None:
        """Write the class names, in the order of their labels, into classes.json.

        Raises UsageError where the run was started with other ones, unless it is continued ``anyway``: a class folder
        more, and labels mean something else.
        """
        path = self.path / "classes.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = None
        if before not in (None, names) and not anyway:
            raise UsageError(f"--data-path: {_first_difference(before, names)} since this run was started ({path}), "
                             "so labels would mean others. Restore the folders, or give --resume-anyway")
        if names and before != names:
            self.write_json(path.name, names)

    def saved_config(self) -> TrainConfig | None:
        """The settings this run was started with, or None for a new folder."""
        path = self.path / "config.json"
        if not path.exists():
            return None
        try:
            return from_tree(json.loads(path.read_text()), TrainConfig(), str(path))
        except ValueError as error:
            raise UsageError(f"{path}: not readable ({error})") from None


def _first_difference(before: list[str], now: list[str]) -> str:
    gone, new = [name for name in before if name not in now], [name for name in now if name not in before]
    if gone or new:
        return f"class {(gone or new)[0]!r} is {'missing' if gone else 'new'}"
    return "the order of the classes has changed"


class Log:
    """Prints a line, and keeps it with its time in log.txt, if the disk lets it: a full one must not hide a message."""

    def __init__(self, folder: RunFolder):
        self._path = folder.path / "log.txt"

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {line}\n")


def open_run(config: TrainConfig, ranks: Ranks) -> RunFolder:
    """Make the run's folder, or take up the existing one of ``--run-dir``; the main rank locks it.

    Raises UsageError on every rank if it cannot be written, is in use, or holds a run with other settings.
    """
    folder = None

    def take() -> Path:
        nonlocal folder
        folder = RunFolder(_make_folder(config.run, config.model_name))
        folder.lock()
        if (saved := folder.saved_config()) is not None:
            check_resumable(config, saved, folder.path)
        return folder.path

    path = ranks.on_main(take)
    return folder or RunFolder(path)


def _make_folder(run: RunConfig, model_name: str) -> Path:
    path = Path(run.run_dir) if run.run_dir else _next_name(Path(run.results_dir), model_name)
    what = f"--run-dir {path}" if run.run_dir else f"--results-dir {run.results_dir}"
    try:
        for folder in (path, path / "checkpoints", path / "samples"):
            folder.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{what}: cannot be written ({error.strerror})") from None
    return path


def _next_name(results: Path, model_name: str) -> Path:
    numbers = [int(match[1]) for path in (results.iterdir() if results.is_dir() else ())
               if (match := re.match(r"^(\d{3,})-", path.name))]
    return results / f"{max(numbers, default=-1) + 1:03d}-{model_name}"


def check_resumable(config: TrainConfig, saved: TrainConfig, run_dir: Path) -> None:
    """Raise UsageError, both values side by side, if a run would be continued as another run."""
    moves_average = config.optim.ema != saved.optim.ema and "off" not in (config.optim.ema, saved.optim.ema)
    keep = [name for name in FIXED_AT_RESUME if name != "ema" or not moves_average]  # on the host it is the same
    fixed, harmless = (_differences(config, saved, names) for names in (keep, HARMLESS_AT_RESUME))
    if fixed:
        raise UsageError(f"--run-dir {run_dir} holds another run: {'; '.join(fixed + harmless)}. "
                         "Give the same settings, or another folder")
    if harmless and not config.run.resume_anyway:
        raise UsageError(f"--run-dir {run_dir} holds another run: {'; '.join(harmless)}. "
                         "Give the same settings, or another folder, or --resume-anyway")


def _differences(config: TrainConfig, saved: TrainConfig, names: Iterable[str]) -> list[str]:
    pairs = [(name, *(getattr(getattr(each, SECTION_OF[name]), name) for each in (saved, config))) for name in names]
    return [f"{flag(name)} was {was}, now {now}" for name, was, now in pairs if was != now]


def changed_settings(config: TrainConfig, saved: TrainConfig | None) -> list[str]:
    """What differs from the settings a run was last started with, as lines to say; nothing for a new run."""
    names = [name for name in SECTION_OF if name not in ("run_dir", "results_dir", "resume_anyway")]
    return _differences(config, saved, names) if saved is not None else []


def environment(device: torch.device, world_size: int) -> dict[str, object]:
    """Versions, device, driver, revision and command: what a result needs beside it to mean something."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": " ".join(sys.argv),
            "python": platform.python_version(), "platform": platform.platform(), "versions": versions,
            "device": device_name(device), "num_devices": world_size, "cpu_threads": torch.get_num_threads(),
            "cuda": torch.version.cuda if device.type == "cuda" else None, "git_revision": _git_revision()}


def device_name(device: torch.device) -> str:
    """The name the driver reports, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, timeout=10,
                              capture_output=True, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
