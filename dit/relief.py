"""Out of memory during a run: a smaller micro-batch, then checkpointing, and the same step again.

Nothing but memory changes: a step's samples are given by their positions, its gradient is the mean over all of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dit.config import TrainConfig, UsageError, replace
from dit.parallel import Ranks
from dit.pulse import Pulse
from dit.run_folder import RunFolder
from dit.step import StepParts

Result = TypeVar("Result")
_FILE = "adapted.json"
_SETTINGS = ("grad_accum", "ckpt", "ckpt_blocks", "ckpt_every_nth")
_CHANGING = ("optimizer", "ema")
"""Phases in which the weights change: they cannot be repeated, and a smaller micro-batch would not help them."""


class OutOfRoom(RuntimeError):
    """The run ends out of memory. The message says where, and what would fit or how to go on."""

    exit_code = 5


@dataclass(frozen=True)
class Forecast:
    """What the planner says of settings: peak of allocated bytes, and whether that fits the device."""

    peak_bytes: int
    fits: bool


class Feed(Protocol):
    """Micro-batches that can be started again at a step, in other portions."""

    def start(self, step: int, accumulation: int) -> None: ...


def adapted(config: TrainConfig, folder: RunFolder, ranks: Ranks, say: Callable[[str], None]) -> TrainConfig:
    """The settings with what an earlier session had to change for lack of memory, as the run folder says. A collective.

    That holds for the settings and the number of devices it was found with, and only where --on-oom is adapt.
    """
    if config.memory.on_oom == "stop":
        return config
    used = ranks.on_main(lambda: _read(config, folder, ranks.world_size))
    if used is None:
        return config
    if ranks.is_main:
        say(f"out of memory in an earlier session ({folder.path / _FILE}): {_in_words(config, used, ranks.world_size)}")
    return used


def _read(config: TrainConfig, folder: RunFolder, world_size: int) -> TrainConfig | None:
    path = folder.path / _FILE
    try:
        content = json.loads(path.read_text())
        found = content["asked"], content["num_devices"]
        used = replace(config, **{name: content["used"][name] for name in _SETTINGS})
        used.micro_batch(world_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not readable ({error}); delete it") from None
    return used if found == (_memory(config), world_size) else None


def _memory(config: TrainConfig) -> dict[str, object]:
    return {name: getattr(config.memory, name) for name in _SETTINGS}


def _in_words(before: TrainConfig, after: TrainConfig, world_size: int) -> str:
    words = (f"micro-batch {before.micro_batch(world_size)} -> {after.micro_batch(world_size)}, accumulation "
             f"{before.memory.grad_accum} -> {after.memory.grad_accum}")
    if after.checkpointed_blocks != before.checkpointed_blocks:
        words += f", checkpointed blocks {before.checkpointed_blocks} -> {after.checkpointed_blocks}"
    return words


def smaller(config: TrainConfig, world_size: int) -> TrainConfig | None:
    """The next settings that need less memory for the same steps, or None.

    The micro-batch is halved (or divided by the next number that divides it); at 1 all blocks are checkpointed.
    """
    micro, accumulation = config.micro_batch(world_size), config.memory.grad_accum
    for factor in range(2, micro + 1):
        if micro % factor == 0:
            return replace(config, grad_accum=accumulation * factor)
    if config.checkpointed_blocks < config.shape.depth:
        return replace(config, ckpt=True, ckpt_blocks=None, ckpt_every_nth=1)
    return None


class Relief:
    """Takes steps, with less memory where there is not enough. ``config`` is what is in use.

    With several processes a rank cannot repeat a step alone: what to change is written into the run folder, the job
    ends with OutOfRoom, and the next start (torchrun --max-restarts makes it by itself) takes it up.
    """

    def __init__(self, asked: TrainConfig, used: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts,
                 pulse: Pulse, feed: Feed, say: Callable[[str], None],
                 forecast: Callable[[TrainConfig], Forecast] | None):
        self._asked, self.config, self._folder, self._ranks = asked, used, folder, ranks
        self._parts, self._pulse, self._feed, self._say, self._forecast = parts, pulse, feed, say, forecast

    def __call__(self, take_step: Callable[[int], Result]) -> Result:
        """Return ``take_step(accumulation)``, called again with more of it as often as memory runs out.

        Raises OutOfRoom where nothing is left to change, or must not be.
        """
        while True:
            try:
                return take_step(self.config.memory.grad_accum)
            except torch.OutOfMemoryError as error:
                what = str(error).splitlines()[0]
            self._change(what)  # outside the handler, whose error holds the step's tensors

    def _change(self, what: str) -> None:
        step, phase, world_size = self._pulse.step, self._pulse.phase, self._ranks.world_size
        rank = f" on rank {self._ranks.rank}" if world_size > 1 else ""
        where = f"out of memory in step {step} ({phase}){rank}: {what}"
        if phase in _CHANGING:
            raise OutOfRoom(f"{where}; a smaller micro-batch would not help there. The newest checkpoint file is whole")
        if self.config.memory.on_oom == "stop":
            raise OutOfRoom(f"{where}; {self._what_would_fit()}")
        after = smaller(self.config, world_size)
        if after is None:
            raise OutOfRoom(f"{where}; the micro-batch is 1 and every block is checkpointed: a smaller model, more "
                            "memory or lower-precision moments are left")
        words = _in_words(self.config, after, world_size) + self._effect(after)
        self._folder.write_json(_FILE, {"asked": _memory(self._asked), "num_devices": world_size,
                                        "used": _memory(after), "step": step, "phase": phase, "error": what})
        if world_size > 1:
            raise OutOfRoom(f"{where}; the same command goes on with {words} (torchrun --max-restarts by itself)")
        self._say(f"{where}; {words}; step {step} is repeated")
        self.config = after
        self._parts.optimizer.zero_grad(set_to_none=True)
        self._parts.model.checkpoint_blocks = after.checkpointed_blocks
        self._parts.model.checkpoint_every = after.memory.ckpt_every_nth
        if self._parts.device.type == "cuda":
            torch.cuda.empty_cache()
        self._feed.start(step, after.memory.grad_accum)

    def _effect(self, after: TrainConfig) -> str:
        before, then = self._planned(self.config), self._planned(after)
        if before is None or then is None:
            return ""
        return f" (planned peak {before.peak_bytes / 2**30:.2f} -> {then.peak_bytes / 2**30:.2f} GiB)"

    def _what_would_fit(self) -> str:
        candidate = smaller(self.config, self._ranks.world_size)
        while candidate is not None and (planned := self._planned(candidate)) is not None:
            if planned.fits:
                words = _in_words(self.config, candidate, self._ranks.world_size)
                return f"this would fit: {words} (planned peak {planned.peak_bytes / 2**30:.2f} GiB)"
            candidate = smaller(candidate, self._ranks.world_size)
        if candidate is None:
            return "no smaller micro-batch would fit, checkpointed or not"
        return "try a higher --grad-accum or --ckpt, or --on-oom adapt"

    def _planned(self, config: TrainConfig) -> Forecast | None:
        try:
            return self._forecast(config) if self._forecast is not None else None
        except Exception:  # noqa: BLE001 - a plan less is no reason for a run less
            return None
