"""Checkpoints that many processes write together: a folder ``0000500.sharded`` by torch.distributed.checkpoint.

Every process writes its parts of the tensors, named and shaped as in the official format whatever way they are shared
out, so the folder can be read by any number of processes, or by one as a whole (``read_whole``), which gives what a
checkpoint file of one process holds. Beside the parts lie ``plain.pt`` (step, settings and the other plain values) and
``manifest.json`` (bytes and CRC-32 of every other file), which is written last: a folder without it is not complete.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dit.config import UsageError
from dit.local_shards import Pieces, local, pieces

MANIFEST, PLAIN = "manifest.json", "plain.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")


def live_pieces(model: nn.Module, optimizer: torch.optim.Optimizer,
                averages: Mapping[str, Tensor]) -> dict[str, Pieces]:
    """Pieces of everything a run keeps: ``model/NAME``, ``ema/NAME``, ``opt/NAME/exp_avg`` ... They share memory."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model/{name}"] = pieces(parameter, local(parameter))
        if name in averages:
            found[f"ema/{name}"] = pieces(parameter, averages[name])
        for moment in MOMENTS if parameter.requires_grad else ():
            found[f"opt/{name}/{moment}"] = pieces(parameter, local(optimizer.state[parameter][moment]))
    return found


# ---- writing ----

class _SavePlanner(DefaultSavePlanner):
    """Writes pieces as torch.distributed.checkpoint writes shards; where several hold the same one, one writes it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([
            WriteItem(index=MetadataIndex(name, torch.Size(offsets)), type=WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk=ChunkStorageMetadata(torch.Size(offsets), box.shape),
                                                  properties=TensorProperties.create_from_tensor(box), size=entry.size))
            for name, entry in self.state_dict.items() for offsets, box in entry.boxes.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].boxes[tuple(index.offset)].detach()


def write(folder: Path, entries: dict[str, Pieces], plain: dict[str, object], group: dist.ProcessGroup | None) -> None:
    """Write the folder together, beside its place, flush it and rename it there. A collective of ``group`` (gloo).

    Raises UsageError, on every process, where one of them cannot write; what was there before stays.
    """
    is_main = dist.get_rank(group) == 0
    temporary = folder.with_name(f".{folder.name}.partial")
    _together(lambda: _make_empty(temporary) if is_main else None, folder, group)
    try:
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True), planner=_SavePlanner(),
                 process_group=group)
    except dcp.api.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise UsageError(_could_not(folder, reason)) from None
    own = list(temporary.glob(f"__{dist.get_rank(group)}_*.distcp"))
    sums = _together(lambda: {path.name: _fingerprint(path) for path in own}, folder, group)
    _together(lambda: _complete(folder, temporary, plain, sums) if is_main else None, folder, group)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(folder: Path, temporary: Path, plain: dict[str, object], sums: list[dict]) -> None:
    with open(temporary / PLAIN, "wb") as file:
        torch.save(plain, file)
        os.fsync(file.fileno())
    files = {name: mark for each in sums for name, mark in each.items()}
    files |= {name: _fingerprint(temporary / name) for name in (PLAIN, ".metadata")}
    missing = [name for name in files if not (temporary / name).exists()]
    if missing:
        raise OSError(None, f"{missing[0]} of another machine is not here; all must write to one shared folder")
    with open(temporary / MANIFEST, "w") as file:
        json.dump({"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _together(work: Callable[[], object], folder: Path, group: dist.ProcessGroup | None) -> list:
    """What ``work`` gave on every process; if it failed on one, UsageError on all. A collective."""
    try:
        outcome = work(), None
    except (OSError, RuntimeError) as error:
        outcome = None, _could_not(folder, error)
    outcomes = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    for _, mistake in outcomes:
        if mistake is not None:
            raise UsageError(mistake)
    return [value for value, _ in outcomes]


def _could_not(folder: Path, error: BaseException) -> str:
    cause = error if isinstance(error, OSError) else error.__context__ or error
    reason = getattr(cause, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return f"could not write {folder}: {reason}; earlier files are untouched"


def _fingerprint(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


# ---- reading ----

def defect(folder: Path) -> str | None:
    """What is wrong with a folder (not complete, a file missing, truncated or altered), or None. Reads all of it."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"not complete: there is no {MANIFEST}"
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} is not readable ({error})"
    for name, mark in files.items():
        try:
            found = _fingerprint(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found[0] != mark[0]:
            return f"truncated: {name} has {found[0]} bytes of {mark[0]}"
        if found != mark:
            return f"altered: {name} fails its checksum"
    return None


class _LoadPlanner(DefaultLoadPlanner):
    """Reads the parts of saved chunks that overlap the pieces of this process."""

    def __init__(self, entries: dict[str, Pieces]):
        super().__init__()
        self.entries = entries

    def plan_for(self, metadata: Metadata) -> LoadPlan:
        return LoadPlan([item for name, entry in self.entries.items() for item in create_read_items_for_chunk_list(
            name, metadata.state_dict_metadata[name],
            [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in entry.boxes.items()])])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.entries[index.fqn].boxes[tuple(index.offset)]


def read_into(folder: Path, entries: dict[str, Pieces]) -> None:
    """Fill pieces from a folder, whoever wrote it. Not a collective. Raises UsageError if the model is another one."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    saved = metadata.state_dict_metadata
    for name, entry in entries.items():
        there = tuple(saved[name].size) if name in saved else "nothing"
        if there != tuple(entry.size):
            raise UsageError(f"{folder}: {name} is {there} in the file and {tuple(entry.size)} in the model; "
                             "the file belongs to another model")
    planner = _LoadPlanner(entries)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(reader.prepare_local_plan(planner.plan_for(metadata)), planner).wait()


def names_in(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a folder: names with their sizes and types."""
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def read_plain(folder: Path) -> dict[str, object]:
    """Step, settings and the other plain values of a folder."""
    return torch.load(folder / PLAIN, map_location="cpu", weights_only=True)


def read_whole(folder: Path) -> dict[str, object]:
    """All of a folder in host memory, as a checkpoint file of one process holds it."""
    saved = names_in(folder)
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    read_into(folder, {name: Pieces(tensor.shape, {(0,) * tensor.ndim: tensor}) for name, tensor in whole.items()})
    plain = read_plain(folder)
    names, steps, groups = plain.pop("names"), plain.pop("opt_steps"), plain.pop("opt_groups")
    state = {**plain, "model": {name: whole[f"model/{name}"] for name in names}}
    state["opt"] = {"state": {index: {"step": step, **{moment: whole[f"opt/{name}/{moment}"] for moment in MOMENTS}}
                              for index, (name, step) in enumerate(steps.items())},
                    "param_groups": groups}
    averages = {name.removeprefix("ema/"): tensor for name, tensor in whole.items() if name.startswith("ema/")}
    if averages:
        state["ema"] = {**state["model"], **averages}
    return state
