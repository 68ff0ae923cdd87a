"""Before a real run starts: has this machine what the run needs? A line per item, green, amber or red: what to do.

Every rank looks at its own machine (``dit.preflight_checks``), then they compare notes and test the collectives. Which
reds stop a run is said in one place, ``stopping``. An item that could not be looked at is amber: preflight never ends a
run by failing itself.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dit import preflight_checks as looks
from dit.config import TrainConfig, UsageError
from dit.data import PositionDataset
from dit.parallel import Ranks
from dit.preflight_checks import Check, failure, guarded
from dit.run_folder import RunFolder

COLOURS = ("green", "amber", "red")
LARGE_MESSAGE_BYTES = 25 << 20  # DDP's bucket
SLOW_RANK = 1.4  # times the median of the other ranks: named as the straggler
_COMPARED = {"matrix_product_seconds": "computes", "seconds_per_sample": "reads data"}
_PREDICTED = ("memory", "device memory")
_REACH = "see that all machines reach each other (NCCL_DEBUG=INFO shows how they try; NCCL_SOCKET_IFNAME says where)"


def preflight(config: TrainConfig, folder: RunFolder | None, ranks: Ranks, plan: dict | None,
              dataset: PositionDataset | None = None, wait_seconds: float = 300.0) -> list[Check]:
    """Check this machine against a validated ``config`` and its plan (the content of plan.json, or None).

    A collective: every rank must call it, and every rank gets the same list. ``dataset`` spares opening the data a
    second time. A rank that has not arrived after ``wait_seconds`` is named in a red "collectives". Nothing that is
    found is raised; see ``stop``.
    """
    plan = plan or {}
    own = [
        guarded("model", lambda: looks.check_model(config, ranks, plan)),
        guarded("memory", lambda: looks.check_memory(plan)),
        guarded("device memory", lambda: looks.check_device_memory(ranks, plan)),
        guarded("precision", lambda: looks.check_precision(config, ranks.device)),
        guarded("data", lambda: looks.check_data(config, ranks, plan, dataset)),
        guarded("shared memory", lambda: looks.check_shared_memory(config, ranks)),
        guarded("disk", lambda: looks.check_disk(config, folder, plan, ranks.is_main)),
    ]
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # the run's figures begin without what was tried here
        torch.cuda.reset_peak_memory_stats(ranks.device)
    if ranks.world_size == 1:
        return [*own, Check("collectives", "green", "one process, nothing to exchange")]
    try:
        return _compare_notes(config, ranks, plan, own, wait_seconds)
    except Exception as error:  # noqa: BLE001 - whatever the network does, the answer is a line
        return [*own, Check("collectives", "red", _missing(error, wait_seconds) or failure(error), _REACH)]


def stopping(checks: Iterable[Check], config: TrainConfig) -> list[Check]:
    """The rule: a red stops the run. Memory is a prediction, which stops it under --plan require only."""
    return [check for check in checks
            if check.colour == "red" and (check.name not in _PREDICTED or config.trial.plan == "require")]


def stop(checks: Iterable[Check], config: TrainConfig) -> None:
    """Raise UsageError, one line, for the first check that stops the run."""
    for check in stopping(checks, config):
        raise UsageError(f"preflight: {check.name}: {check.found}" + (f"; {check.advice}" if check.advice else ""))


def show(checks: Iterable[Check], say: Callable[[str], None], quiet: bool = False) -> None:
    """Say the checks, a line each; ``quiet`` says of the green ones only how many they are."""
    checks = list(checks)
    shown = [check for check in checks if not quiet or check.colour != "green"]
    for check in shown:
        say(f"preflight  {check}")
    if quiet:
        say(f"preflight  {len(checks) - len(shown)} of {len(checks)} checks green")


def as_dicts(checks: Iterable[Check]) -> list[dict[str, object]]:
    """The checks as plain values, for JSON."""
    return [asdict(check) for check in checks]


# ---- several ranks ----

def _compare_notes(config: TrainConfig, ranks: Ranks, plan: dict, own: list[Check], wait_seconds: float) -> list[Check]:
    """All ranks' checks in one list, and the check of the collectives. Every exchange happens on every rank."""
    dist.monitored_barrier(ranks.control, timeout=timedelta(seconds=wait_seconds), wait_all_ranks=True)
    large = _buffer(ranks)
    noted = ranks.gather((own, large is not None))
    merged = merge([checks for checks, _ in noted])
    if not all(has_buffer for _, has_buffer in noted):
        rank = next(rank for rank, (_, has_buffer) in enumerate(noted) if not has_buffer)
        return [*merged, Check("collectives", "amber", f"could not be checked (no memory on rank {rank})")]
    latency, seconds = (max(values) for values in zip(*ranks.gather(_time_all_reduce(ranks, large)), strict=True))
    return [*merged, judge(config, ranks.world_size, plan, latency, seconds, straggler(merged_figures(noted)))]


def _missing(error: Exception, wait_seconds: float) -> str | None:
    """Which ranks torch's monitored barrier was waiting for, if that is what failed."""
    lost = re.search(r"[Rr]anks? ([\d, ]*\d) failed to pass monitoredBarrier", str(error))
    return f"rank {lost[1]} had not arrived after {wait_seconds:g} s" if lost else None


def _buffer(ranks: Ranks) -> torch.Tensor | None:
    try:
        return torch.zeros(LARGE_MESSAGE_BYTES // 4, device=ranks.device)
    except RuntimeError:
        return None


def _time_all_reduce(ranks: Ranks, large: torch.Tensor) -> tuple[float, float]:
    """Median seconds of an all-reduce of one number and of ``large``, over the group that trains."""
    def once(tensor: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the device
        return time.perf_counter() - start

    small = large[:1].clone()
    for tensor in (small, large):  # the first exchange builds the connections
        once(tensor)
    return statistics.median(once(small) for _ in range(11)), statistics.median(once(large) for _ in range(3))


def merge(by_rank: list[list[Check]]) -> list[Check]:
    """One check per item, the worst of all ranks (the lowest among equals), whose rank is named unless it is green."""
    merged = []
    for same in zip(*by_rank, strict=True):
        rank = max(range(len(same)), key=lambda rank: (COLOURS.index(same[rank].colour), -rank))
        worst = same[rank]
        if worst.colour != "green":
            worst = replace(worst, found=f"rank {rank}: {worst.found}")
        merged.append(worst)
    return merged


def merged_figures(noted: list[tuple[list[Check], bool]]) -> dict[str, list[float]]:
    """Figure -> its values by rank, of those that every rank has."""
    by_rank = [{name: value for check in checks for name, value in check.figures.items()} for checks, _ in noted]
    return {name: [figures[name] for figures in by_rank] for name in _COMPARED
            if all(name in figures for figures in by_rank)}


def straggler(figures: dict[str, list[float]]) -> str:
    """"rank 3 computes 2.1 times as slowly as the others", or nothing."""
    for name, values in figures.items():
        slowest = max(range(len(values)), key=values.__getitem__)
        ratio = values[slowest] / statistics.median(values[:slowest] + values[slowest + 1:])
        if ratio > SLOW_RANK:
            return f"rank {slowest} {_COMPARED[name]} {ratio:.1f} times as slowly as the others"
    return ""


def judge(config: TrainConfig, world_size: int, plan: dict, latency: float, seconds: float, slow: str) -> Check:
    """The check of the collectives from the seconds that all-reduces of one number and of 25 MiB take.

    Bandwidth is what each link carries in a ring: 2 (n - 1) / n times the message over its time, as nccl-tests defines
    its bus bandwidth.
    """
    sent = 2 * (world_size - 1) / world_size
    rate = sent * LARGE_MESSAGE_BYTES / seconds
    figures = {"latency_seconds": latency, "bytes_per_second": rate}
    found = f"{world_size} ranks, latency {1e6 * latency:.0f} us, {rate / 1e9:.2f} GB/s"
    if slow:
        return Check("collectives", "amber", f"{found}; {slow}, and all wait for it",
                     "look for another process, a hot device or a slow disk there", figures)
    step = plan.get("time", {}).get("step_seconds", {}).get("mid")
    if step:
        exchange = sent * 4 * plan["model"]["parameters"] / rate
        found += f", {1e3 * exchange:.1f} ms for the gradients of a step of {1e3 * step:.1f} ms"
        if exchange > 0.5 * step:  # about what a backward can hide
            return Check("collectives", "amber", f"{found}: devices will wait for the network",
                         f"a larger --grad-accum (now {config.memory.grad_accum}) exchanges less often", figures)
    return Check("collectives", "green", found, figures=figures)
