"""Devices and processes: which device this rank has, how the model is wrapped, and what ranks tell each other.

One process (plain python) needs no process group; every function here then does the obvious thing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dit.config import UsageError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among all: ``rank`` of ``world_size``, on ``device``; ``control`` carries messages on the host."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, tensor: Tensor) -> Tensor:
        """Mean of a tensor over ranks, in place. A collective: every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
            tensor /= self.world_size
        return tensor

    def broadcast(self, value: object) -> object:
        """Rank 0's picklable ``value`` on every rank. A collective."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: object) -> list[object]:
        """Every rank's picklable ``value``, by rank, on every rank. A collective."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` on rank 0 alone; return its (picklable) result on every rank.

        Its UsageError ends every rank: rank 0 raises it, the others leave with the same exit code and say nothing.
        """
        if self.world_size == 1:
            return work()
        outcome = None
        if self.is_main:
            try:
                outcome = work(), None
            except UsageError as error:
                outcome = None, str(error)
        value, mistake = self.broadcast(outcome)
        if mistake is not None:
            raise UsageError(mistake) if self.is_main else SystemExit(2)
        return value

    def barrier(self) -> None:
        """Wait for every rank, on the host."""
        if self.world_size > 1:
            dist.barrier(group=self.control)


@contextmanager
def processes(timeout_minutes: float = 30.0) -> Iterator[Ranks]:
    """Join the processes torchrun started (or none) and leave them at the end, also after an error."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, local_rank, 1, device)
        return
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        yield Ranks(rank, local_rank, world_size, device, control)
    finally:
        dist.destroy_process_group()


def wrap_ddp(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model under DistributedDataParallel, its gradients views of the buckets; itself when there is one process."""
    if ranks.world_size == 1:
        return model
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


class StopVote:
    """Ranks agree, without waiting, on when to stop: if any asks in step s, all are told at the end of step s + 1.

    What is asked and told is the number of a signal; 0 is none, and the highest wins.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._flag, self._pending = torch.zeros(1), None

    def __call__(self, asked: int) -> int:
        """Cast this step's vote and return the outcome of the last one. Every rank must call it in every step."""
        if self._ranks.world_size == 1:
            return asked
        outcome = 0
        if self._pending is not None:
            self._pending.wait()
            outcome = int(self._flag.item())
        self._flag = torch.full((1,), float(asked))
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
        return outcome

    def close(self) -> None:
        """Wait for the vote still under way, so that no rank leaves a collective half done."""
        if self._pending is not None:
            self._pending.wait()
