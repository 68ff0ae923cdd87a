"""Runs a function on several ranks (gloo) in forked processes, which have torch and the project imported already."""

import multiprocessing
import os
import traceback
from collections.abc import Callable

TIMEOUT_SECONDS = 120


def run_ranks(world_size: int, function: Callable, *args: object, folder) -> list:
    """``function(ranks, *args)`` on every rank; returns what each returned, by rank, or raises what one raised.

    ``folder`` (a Path) is where the ranks find each other.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    (folder / "rendezvous").unlink(missing_ok=True)
    processes = [context.Process(target=_run, args=(rank, world_size, function, args, str(folder), results))
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        outcomes = [results.get(timeout=TIMEOUT_SECONDS) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    failed = [text for _, text, _ in outcomes if text]
    assert not failed, "\n".join(failed)
    return [value for _, _, value in sorted(outcomes, key=lambda outcome: outcome[0])]


def _run(rank: int, world_size: int, function: Callable, args: tuple, folder: str, results) -> None:
    import torch
    import torch.distributed as dist

    from dit.parallel import Ranks

    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
        ranks = Ranks(rank, rank, world_size, torch.device("cpu"), dist.new_group(backend="gloo"))
        results.put((rank, None, function(ranks, *args)))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - the test process must hear of it
        results.put((rank, f"rank {rank}: {traceback.format_exc()}", None))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)
