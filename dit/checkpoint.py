"""Checkpoint files: named states saved atomically, the newest valid one found again, and the official format.

A file is a dictionary of tensors and plain values: ``model`` and ``ema`` (state dicts with the official names), ``opt``
(as torch's optimizers write it), ``scaler``, ``step``, ``config`` (the tree of config.json) and ``format``. It loads
with ``weights_only=True``. The zip container keeps a CRC-32 of every record, which is checked before a file is trusted.
"""

import argparse
import dataclasses
import os
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from dit.config import PRESETS, ModelShape, UsageError
from dit.low_bit import restore

FORMAT = 1
SHARDED = ".sharded"
"""Suffix of a folder that many processes wrote together, see ``dit.sharded_checkpoint``; it counts as a file."""
_NAME = re.compile(r"^(\d{7,})\.(pt|sharded)$")


def path_of(folder: Path, step: int) -> Path:
    """The file of a step: ``0000500.pt``."""
    return folder / f"{step:07d}.pt"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a file in ``folder``, ascending; valid or not."""
    if not folder.is_dir():
        return []
    return sorted({int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))})


def present(folder: Path, step: int) -> list[Path]:
    """What there is of a step, valid or not: its file, its folder of many processes, both after a change of devices."""
    file = path_of(folder, step)
    return [path for path in (file, file.with_suffix(SHARDED)) if path.exists()]


def size_of(path: Path) -> int:
    """Bytes of a checkpoint file; 0 where there is none."""
    files = path.iterdir() if path.is_dir() else [path] if path.exists() else []
    return sum(file.stat().st_size for file in files)


def save(path: Path, state: dict[str, object]) -> None:
    """Write a file beside ``path``, flush it to the disk and rename it into place: at any moment a whole one is there.

    Raises UsageError where the disk is full or read-only; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__ or error
        temporary.unlink(missing_ok=True)
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(f"could not write {path}: {reason}; earlier files are untouched") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk; a missing one is passed over."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors, memory that several share counted once: the size of a file of them, but for its index."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def prune(folder: Path, newest: int, keep_last: int, keep_every: int) -> None:
    """Delete old files: the ``keep_last`` up to step ``newest`` stay (0: all), and multiples of ``keep_every``.

    A file beyond ``newest`` was found broken when the run was taken up; it counts for nothing and is left alone.
    """
    kept = [step for step in steps_in(folder) if step <= newest]
    for step in kept[:-keep_last] if keep_last else []:
        if not (keep_every and step % keep_every == 0):
            for path in present(folder, step):
                _remove(path)
    for leftover in folder.glob(".*.*.*"):  # of a process that was killed while it saved
        _remove(leftover)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def defect(path: Path) -> str | None:
    """What is wrong with a file (missing, truncated, altered, something else), or None. Reads all of it once."""
    if path.suffix == SHARDED and path.is_dir():
        from dit import sharded_checkpoint

        return sharded_checkpoint.defect(path)
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except FileNotFoundError:
        return "no such file"
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError) as error:  # the last: unknown or encrypted
        return f"truncated or not a checkpoint file ({error})"
    return f"altered: record {broken} fails its checksum" if broken else None


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole file in ``folder`` (None: there is none), and one line about each newer one that was skipped."""
    skipped = []
    for path in (path for step in reversed(steps_in(folder)) for path in present(folder, step)):
        problem = defect(path)
        if problem is None:
            return path, skipped
        skipped.append(f"skipped {path}: {problem}")
    return None, skipped


def load(path: str | Path, is_checked: bool = False) -> dict[str, object]:
    """Read a checkpoint file into host memory, mapped and not copied. Raises UsageError for anything else.

    ``is_checked`` says that ``newest_valid`` has just read all of the file.
    """
    path = Path(path)
    if path.is_dir() and path.suffix != SHARDED:
        raise UsageError(f"{path}: is a folder; name one of its .pt files")
    problem = None if is_checked else defect(path)
    if problem is not None:
        raise UsageError(f"{path}: {problem}")
    if path.is_dir():
        from dit import sharded_checkpoint

        return sharded_checkpoint.read_whole(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the official files carry their flags like this
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise UsageError(f"{path}: not a checkpoint file of this project ({str(error).splitlines()[0]})") from None
    if isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()) and "pos_embed" in state:
        state = {"ema": state}  # the official released weights: the bare EMA
    if not isinstance(state, dict) or not ("model" in state or "ema" in state):
        raise UsageError(f"{path}: not a checkpoint file of this project (neither model nor ema in it)")
    return state


def weights(state: dict[str, object], which: str, source: str) -> dict[str, Tensor]:
    """The ``ema`` or ``model`` weights of a loaded file. Raises UsageError naming what is there instead."""
    if which not in state:
        there = " and ".join(name for name in ("model", "ema") if name in state)
        raise UsageError(f"--weights {which}: {source} holds only {there}")
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in state[which].items()}


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Copy weights into ``model``, every name and shape checked. Raises UsageError with the first difference."""
    own = model.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        there = tuple(tensors[name].shape) if name in tensors else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if there != wanted:
            raise UsageError(f"{source}: {name} is {there} in the file and {wanted} in the model; "
                             "the file belongs to another model")
    model.load_state_dict(tensors)


def shape_of(state: dict[str, object], tensors: dict[str, Tensor]) -> ModelShape:
    """The model's shape: as the file says, or, for an official file, as its tensors show."""
    if "shape" in state:
        fields = dict(state["shape"])
        fields["input_size"] = tuple(fields["input_size"])
        return ModelShape(**fields)
    hidden, channels, patch, _ = tensors["x_embedder.proj.weight"].shape
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    side = int(tensors["pos_embed"].shape[1] ** 0.5) * patch
    rows = tensors["y_embedder.embedding_table.weight"].shape[0]
    learn_sigma = tensors["final_layer.linear.bias"].numel() == 2 * channels * patch * patch
    heads = next((preset["num_heads"] for preset in PRESETS.values()
                  if (preset["depth"], preset["hidden_size"]) == (depth, hidden)), hidden // 64)
    return ModelShape(input_size=(side, side), patch_size=patch, in_channels=channels, hidden_size=hidden, depth=depth,
                      num_heads=heads, num_classes=rows - 1, learn_sigma=learn_sigma)


def shape_tree(shape: ModelShape) -> dict[str, object]:
    """A shape as plain values, for a file."""
    return {**dataclasses.asdict(shape), "input_size": list(shape.input_size)}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    """Copy an optimizer's moments into those already allocated, so that a resumed run peaks where a fresh one does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in state["state"][index].items():
            restore(optimizer.state[parameter][name], value)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every weight is a finite number. Waits for the device."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
