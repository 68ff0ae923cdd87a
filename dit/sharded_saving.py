"""Saving and taking up runs whose tensors are spread over processes; and the choice between this and one file."""

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from dit import checkpoint
from dit.config import TrainConfig, UsageError
from dit.config_files import to_tree
from dit.guards import Diverged
from dit.local_shards import is_sharded
from dit.parallel import Ranks
from dit.run_folder import RunFolder
from dit.saving import HostCopies, Saver, newest, refuse_not_finite, saved_line
from dit.saving import resume as resume_whole
from dit.step import StepParts


def saver_for(config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts,
              say: Callable[[str], None]) -> Saver:
    """The saver of a run: one file by the main rank, or one folder by all where the tensors are spread over them."""
    return (ShardedSaver if spreads(parts) else Saver)(config, folder, ranks, parts, say)


def spreads(parts: StepParts) -> bool:
    """Whether the model's tensors are spread over processes."""
    return any(is_sharded(parameter) for parameter in parts.model.parameters())


def _pieces(parts: StepParts):
    from dit.sharded_checkpoint import live_pieces

    return live_pieces(parts.model, parts.optimizer, parts.ema.state_dict() if parts.ema is not None else {})


def resume(folder: RunFolder, ranks: Ranks, parts: StepParts, say: Callable[[str], None]) -> tuple[int, int]:
    """Load the newest valid checkpoint file, whoever wrote it; see ``saving.resume``. A collective.

    Of a folder of many processes each rank reads the parts that it holds now; of a file, mapped, likewise.
    """
    if not spreads(parts):
        return resume_whole(folder, ranks, parts, say)
    path = newest(folder, ranks, say)
    if path is None:
        return 0, 0
    state = _read_into(path, parts)
    for name, parameter in parts.model.named_parameters():
        if parameter.requires_grad:
            parts.optimizer.state[parameter]["step"].copy_(state["opt_steps"][name])
    if state.get("scaler"):
        parts.precision.scaler.load_state_dict(state["scaler"])
    ranks.barrier()
    return state["step"], state.get("bad_steps", 0)


def _read_into(path: Path, parts: StepParts) -> dict[str, object]:
    """Fill this rank's parts; returns the plain values."""
    from dit import sharded_checkpoint

    entries = _pieces(parts)
    if path.suffix == checkpoint.SHARDED:
        there = sharded_checkpoint.names_in(path)
        new = [name for name in entries if name.startswith("ema/") and name not in there]  # it begins as the weights
        begin = {name.replace("ema/", "model/", 1): entries.pop(name) for name in new}
        sharded_checkpoint.read_into(path, entries)
        sharded_checkpoint.read_into(path, begin)
        return sharded_checkpoint.read_plain(path)
    state = checkpoint.load(path, is_checked=True)
    trained = [name for name, parameter in parts.model.named_parameters() if parameter.requires_grad]
    moments = dict(zip(trained, state["opt"]["state"].values()))
    wholes = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    wholes |= {f"ema/{name}": tensor for name, tensor in state.get("ema", state["model"]).items()}
    wholes |= {f"opt/{name}/{moment}": tensor for name, of in moments.items() for moment, tensor in of.items()}
    for name, entry in entries.items():
        there = tuple(wholes[name].shape) if name in wholes else "nothing"
        if there != tuple(entry.size):
            raise UsageError(f"{path}: {name} is {there} in the file and {tuple(entry.size)} in the model; "
                             "the file belongs to another model")
        entry.copy_from(wholes[name])
    return {**state, "opt_steps": {name: of["step"] for name, of in moments.items()}}


class ShardedSaver(Saver):
    """Saves folders that all ranks write together, beside the training; every rank copies and writes its own parts."""

    def __init__(self, config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts,
                 say: Callable[[str], None]):
        super().__init__(config, folder, ranks, parts, say)
        self._copies = HostCopies(parts.device)
        self._group = dist.new_group(backend="gloo")  # the thread's own: messages of the loop must not mix with its

    def _state(self, step: int, bad_steps: int) -> dict[str, object]:
        """The live parts and the plain values; see ``sharded_checkpoint.read_whole`` for how they become a file."""
        parts, entries = self._parts, _pieces(self._parts)
        opt_steps = {name: parts.optimizer.state[parameter]["step"]
                     for name, parameter in parts.model.named_parameters() if parameter.requires_grad}
        return {"step": step, "boxes": {name: entry.boxes for name, entry in entries.items()},
                "sizes": {name: entry.size for name, entry in entries.items()},
                "plain": {"format": checkpoint.FORMAT, "step": step, "bad_steps": bad_steps,
                          "names": list(parts.model.state_dict()), "scaler": parts.precision.scaler.state_dict(),
                          "opt_steps": opt_steps, "opt_groups": [{**parts.optimizer.state_dict()["param_groups"][0],
                                          "params": list(range(len(opt_steps)))}],
                          "config": to_tree(self._config), "shape": checkpoint.shape_tree(self._config.shape)}}

    def _bytes(self, state: dict[str, object]) -> int:
        return 4 * sum(size.numel() for size in state["sizes"].values())

    def _check_room(self, state: dict[str, object]) -> None:
        if self._ranks.is_main:
            super()._check_room(state)

    def _write(self, step: int, state: dict[str, object], ready: Callable[[], None], pause: float) -> None:
        from dit.sharded_checkpoint import Pieces, write

        start, folder, run = time.perf_counter(), self._folder, self._config.run
        path = checkpoint.path_of(folder.checkpoints, step).with_suffix(checkpoint.SHARDED)
        try:
            ready()
            self._agree_that_finite(state, path)
            entries = {name: Pieces(state["sizes"][name], boxes) for name, boxes in state["boxes"].items()}
            if self._ranks.is_main:
                checkpoint.flush(folder.metrics)
            write(path, entries, state["plain"], self._group)
            if self._ranks.is_main:
                checkpoint.prune(folder.checkpoints, step, run.keep_last, run.keep_every)
                self._line = saved_line(path, time.perf_counter() - start, pause)
        except Exception as error:  # noqa: BLE001 - whatever it is, the loop must hear of it
            is_everywhere = isinstance(error, UsageError | Diverged)  # so that the main rank says it for all
            code = getattr(error, "exit_code", 2)
            self._error = SystemExit(code) if is_everywhere and not self._ranks.is_main else error

    def _agree_that_finite(self, state: dict[str, object], path: Path) -> None:
        """Raise Diverged on every rank if one of them holds a number that is not finite."""
        found = None
        try:
            refuse_not_finite(state, path)
        except Diverged as error:
            found = str(error)
        everywhere = [None] * self._ranks.world_size
        dist.all_gather_object(everywhere, found, group=self._group)
        if any(everywhere):
            raise Diverged(next(text for text in everywhere if text))
