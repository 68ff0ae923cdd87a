"""Checkpoint files of a run: what goes into one, written beside the training, and taken up again.

The loop only waits until the state is copied to host memory; checking, writing and flushing happen on a thread, one
file at a time.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from dit import checkpoint
from dit.config import TrainConfig, UsageError
from dit.config_files import to_tree
from dit.guards import Diverged
from dit.low_bit import packed
from dit.parallel import Ranks
from dit.run_folder import RunFolder
from dit.step import Phase, StepParts
from dit.terminal import duration

_SPARE_BYTES = 16 * 2**20
"""Room a save leaves for the logs."""
_SECONDS_PER_LOOK = 0.02
"""How often the end of a run looks whether its last file is complete."""


def state_of(config: TrainConfig, parts: StepParts, step: int, bad_steps: int = 0) -> dict[str, object]:
    """Everything a run needs to go on, under the names of the official format and a few of our own.

    The tensors are the live ones. ``bad_steps`` is the number of steps skipped in a row up to now.
    """
    model = parts.model.state_dict()
    state = {"model": model, "opt": packed(parts.optimizer.state_dict()), "scaler": parts.precision.scaler.state_dict(),
             "step": step, "bad_steps": bad_steps, "config": to_tree(config),
             "shape": checkpoint.shape_tree(config.shape)}
    if parts.ema is not None:
        state["ema"] = {**model, **parts.ema.state_dict()}
    return state


def resume(folder: RunFolder, ranks: Ranks, parts: StepParts, say: Callable[[str], None]) -> tuple[int, int]:
    """Load the newest valid checkpoint file, if any. Returns (steps already done, steps skipped in a row up to there).

    The file is read into host memory that is given back before the first step. A collective.
    """
    path = newest(folder, ranks, say)
    if path is None:
        return 0, 0
    state = checkpoint.load(path, is_checked=True)
    checkpoint.load_weights(parts.model, state["model"], str(path))
    checkpoint.load_optimizer(parts.optimizer, state["opt"])
    if parts.ema is not None:
        parts.ema.load_state_dict(state.get("ema", state["model"]))
    if state.get("scaler"):
        parts.precision.scaler.load_state_dict(state["scaler"])
    return state["step"], state.get("bad_steps", 0)


def newest(folder: RunFolder, ranks: Ranks, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint file, the same on every rank; says which newer ones are not whole. A collective."""
    path, skipped = ranks.broadcast(checkpoint.newest_valid(folder.checkpoints) if ranks.is_main else None)
    for line in skipped if ranks.is_main else ():
        say(line)
    return path


class HostCopies:
    """Copies of a state in host memory. Those of a GPU's tensors are pinned and made on a stream of their own.

    Pinned memory is slow to get, so it is kept for the next copy; memory of a CPU's copies is given back.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[str, Tensor] = {}
        self._done: torch.cuda.Event | None = None

    def take(self, state: dict[str, object]) -> tuple[dict[str, object], Callable[[], None]]:
        """Copy every tensor of ``state``. Returns the copy and what must be called before it is read."""
        if self._stream is None:
            return _map_tensors(state, lambda _, tensor: tensor.detach().clone()), lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = _map_tensors(state, self._copy)
        self._done = self._stream.record_event()
        return copies, self._done.synchronize

    def hold_update(self) -> None:
        """Let the device's further work wait until it has been copied, for it is about to change what is copied."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    def _copy(self, path: str, tensor: Tensor) -> Tensor:
        if path not in self._pinned:
            self._pinned[path] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return self._pinned[path].copy_(tensor.detach(), non_blocking=True)


def _map_tensors(tree: object, copy: Callable[[str, Tensor], Tensor], path: str = "",
                 made: dict[tuple, Tensor] | None = None) -> object:
    """``tree`` with every tensor replaced by ``copy(path, tensor)``; one that occurs twice is copied once."""
    made = {} if made is None else made
    if isinstance(tree, Tensor):
        key = (tree.data_ptr(), tree.dtype, tuple(tree.shape))
        if key not in made:
            made[key] = copy(path, tree)
        return made[key]
    if isinstance(tree, dict):
        return {name: _map_tensors(value, copy, f"{path}/{name}", made) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, copy, f"{path}/{index}", made) for index, value in enumerate(tree))
    return tree


def named_tensors(tree: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree of dicts and lists with its path: ``model/pos_embed``."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_tensors(value, f"{path}/{name}" if path else str(name))


class Saver:
    """Saves a run beside its training; the main rank writes, on the others nothing happens.

    What went wrong on the thread is raised by the next call in the loop: UsageError where the disk is full or cannot be
    written, Diverged where a number is not finite. Files written before stay as they are.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts,
                 say: Callable[[str], None]):
        self._config, self._folder, self._ranks, self._parts, self._say = config, folder, ranks, parts, say
        self._copies = HostCopies(parts.device) if ranks.is_main else None
        self._thread: threading.Thread | None = None
        self._line, self._error = "", None

    def check_room(self) -> None:
        """Raise UsageError if the disk has no room for one file. Every rank must call it."""
        state = self._state(0, 0)
        self._ranks.on_main(lambda: self._check_room(state))

    def save(self, step: int, bad_steps: int) -> None:
        """Begin to write the file of ``step``; wait only for the file before it and for the copy. On every rank."""
        start = time.perf_counter()
        if self._copies is None:
            return
        state = self._state(step, bad_steps)
        self.wait()
        self._check_room(state)
        copies, ready = self._copies.take(state)
        pause = time.perf_counter() - start
        self._thread = threading.Thread(target=self._write, args=(step, copies, ready, pause), name="save", daemon=True)
        self._thread.start()

    def observe(self, inner: Phase) -> Phase:
        """The phase observer ``inner``, after which the device changes nothing that is still to be copied."""
        def phase(name: str) -> AbstractContextManager:
            if name == "optimizer" and self._copies is not None:
                self._copies.hold_update()
            return inner(name)

        return phase

    def poll(self) -> None:
        """Say that the file under way is complete, or raise what went wrong; nothing while it is being written."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the file under way; say that it is complete, or raise what went wrong."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        line, error, self._line, self._error = self._line, self._error, "", None
        if error is not None:
            raise error
        if line:
            self._say(line)

    def last(self, tell: Callable[[], None]) -> None:
        """Wait, as ``wait`` does, for the last file of all ranks, calling ``tell`` meanwhile. A collective.

        A rank whose own part is done waits for the others here, so that it hears of what goes wrong with theirs.
        """
        while self._is_awaited():
            tell()
            time.sleep(_SECONDS_PER_LOOK)
        self.wait()

    def finish(self) -> None:
        """Let the file under way become complete, whatever comes of it; for a process that is about to end."""
        if self._thread is not None:
            self._thread.join()

    def _is_awaited(self) -> bool:
        """Whether a file is being written on some rank and has failed on none. A collective."""
        is_writing = self._thread is not None and self._thread.is_alive()
        writing, failed = zip(*self._ranks.gather((is_writing, self._error is not None)))
        return any(writing) and not any(failed)

    def _state(self, step: int, bad_steps: int) -> dict[str, object]:
        return state_of(self._config, self._parts, step, bad_steps)

    def _bytes(self, state: dict[str, object]) -> int:
        return checkpoint.bytes_of(tensor for _, tensor in named_tensors(state))

    def _check_room(self, state: dict[str, object]) -> None:
        needed = self._bytes(state) + _SPARE_BYTES
        try:
            free = shutil.disk_usage(self._folder.checkpoints).free
        except OSError as error:
            raise UsageError(f"{self._folder.checkpoints}: {error.strerror}; the file was not written") from None
        if free < needed:
            raise UsageError(f"{self._folder.checkpoints}: {free / 2**30:.3g} GiB free, a checkpoint file needs "
                             f"{needed / 2**30:.3g}; make room (--keep-last keeps {self._config.run.keep_last}) or "
                             "choose another --results-dir; earlier files are untouched")

    # ---- on the thread ----

    def _write(self, step: int, state: dict[str, object], ready: Callable[[], None], pause: float) -> None:
        start = time.perf_counter()
        path = checkpoint.path_of(self._folder.checkpoints, step)
        try:
            ready()
            refuse_not_finite(state, path)
            checkpoint.flush(self._folder.metrics)  # the lines of these steps are as safe as the file
            checkpoint.save(path, state)
            checkpoint.prune(self._folder.checkpoints, step, self._config.run.keep_last, self._config.run.keep_every)
            self._line = saved_line(path, time.perf_counter() - start, pause)
        except Exception as error:  # noqa: BLE001 - whatever it is, the loop must hear of it
            self._error = error


def saved_line(path: Path, seconds: float, pause: float) -> str:
    """What to say of a file that is complete; ``pause`` is how long the training waited, in seconds."""
    return (f"saved {path}  {checkpoint.size_of(path) / 2**30:.2f} GiB in {duration(seconds)}; "
            f"training paused {1e3 * pause:.0f} ms")


def refuse_not_finite(state: dict[str, object], path: Path) -> None:
    """Raise Diverged naming the first tensor with a number that is not finite."""
    for name, tensor in named_tensors(state):
        if tensor.is_floating_point() and not checkpoint.is_finite([tensor]):
            newest, _ = checkpoint.newest_valid(path.parent)
            left = f"the last good file is {newest}" if newest else "no checkpoint file had been written"
            raise Diverged(f"after step {state['step']} {name} is not finite; {path.name} was not written; {left}. "
                           "Try a lower --lr or --clip-grad 1")
