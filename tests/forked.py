"""Runs a function on several ranks (gloo) in forked processes, which have torch and the project imported already."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401 - torch's optimizers import it on first use, which takes seconds
import torch.distributed as dist
from sessions import free_port

from dit.parallel import Ranks

TIMEOUT_SECONDS = 120


def run_ranks(world_size: int, function: Callable, *args: object, folder: Path) -> list:
    """``function(ranks, *args)`` on every rank; returns what each returned, by rank, or raises what one raised.

    ``folder`` is where they put what they return.
    """
    context = multiprocessing.get_context("fork")
    for rank in range(world_size):
        (folder / f"rank{rank}").unlink(missing_ok=True)
    port = free_port()
    processes = [context.Process(target=_run, args=(rank, world_size, port, function, args, folder))
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for process in processes:
        process.join(timeout=max(0, deadline - time.monotonic()))
        process.kill()
    outcomes = [torch.load(folder / f"rank{rank}", weights_only=False) if (folder / f"rank{rank}").exists()
                else (f"rank {rank} said nothing", None) for rank in range(world_size)]
    failed = [text for text, _ in outcomes if text]
    assert not failed, "\n".join(failed)
    return [value for _, value in outcomes]


def _run(rank: int, world_size: int, port: int, function: Callable, args: tuple, folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo")
        ranks = Ranks(rank, rank, world_size, torch.device("cpu"), dist.new_group(backend="gloo"))
        torch.save((None, function(ranks, *args)), folder / f"rank{rank}")
        dist.barrier()
    except BaseException:  # noqa: BLE001 - the test process must hear of it
        torch.save((f"rank {rank}: {traceback.format_exc()}", None), folder / f"rank{rank}")
    finally:
        os._exit(0)
