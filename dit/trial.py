"""Plan, freeze, train, measure: a trial holds a prediction against the run it predicted.

The plan is written and hashed before the first step and never changed again; a trial that was interrupted and is
continued is judged by the plan it began with.
"""

import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dit import checkpoint, planner
from dit.config import TrainConfig, UsageError, replace
from dit.metrics import DeviceFacts, read_metrics
from dit.parallel import Ranks
from dit.planner import compare, flops, hardware, pictures
from dit.precision import resolve
from dit.relief import Forecast
from dit.run_folder import RunFolder, device_name
from dit.trainer import Outcome, train

MEMORY_STEPS = 3
"""Memory is measured over at least this many whole steps: step 1 may fit where step 2 to 4 do not."""


@dataclass(frozen=True)
class FrozenPlan:
    """A plan (the content of plan.json) and the SHA-256 of the file's bytes."""

    content: dict
    sha256: str


def freeze_plan(config: TrainConfig, folder: RunFolder, ranks: Ranks) -> FrozenPlan:
    """Write the plan of this run once, or read the one it was started with."""
    if not folder.plan.exists():
        whole = replace(config, trial=False)
        device = present_device(ranks)
        planned = planner.plan(whole, device, ranks.world_size, num_samples=planner.known_samples(whole),
                               loader_rate=planner.measured_loader_rate(whole))
        pictures.draw_memory(planned, device, folder.path / "memory.png")
        folder.write_json("plan.json", planned.to_dict())
    text = folder.plan.read_bytes()
    try:
        return FrozenPlan(json.loads(text), hashlib.sha256(text).hexdigest())
    except ValueError:
        raise UsageError(f"{folder.plan}: not readable; delete it to plan again") from None


def present_device(ranks: Ranks) -> hardware.Device:
    """The catalogue's entry of the device this process runs on; a GPU it does not know is described by its driver."""
    if ranks.device.type == "cpu":
        return hardware.cpu_device()
    import torch

    try:
        return hardware.find_device(device_name(ranks.device))
    except UsageError:
        return hardware.custom_device(torch.cuda.get_device_properties(ranks.device).total_memory)


def device_facts(config: TrainConfig, ranks: Ranks, plan: FrozenPlan | None) -> DeviceFacts:
    """Training FLOPs per image without recomputation, the device's dense peak, and the step as planned."""
    peak = present_device(ranks).peak_flops[resolve(config, ranks.device).name]
    step, memory = (plan.content["time"]["step_seconds"], plan.content["memory"]) if plan else ({}, {})
    return DeviceFacts(flops.train_flops_per_image(config.shape), peak, step.get("mid"),
                       memory.get("peak_allocated_bytes"))


def forecast(config: TrainConfig, ranks: Ranks) -> Forecast:
    """The planned memory of settings on the present device."""
    memory = planner.plan(replace(config, trial=False), present_device(ranks), ranks.world_size).to_dict()["memory"]
    return Forecast(memory["peak_allocated_bytes"], memory["verdict"] == "fits")


def run_trial(config: TrainConfig, folder: RunFolder, ranks: Ranks, facts: DeviceFacts, plan: FrozenPlan | None,
              say: Callable[[str], None]) -> tuple[Outcome, dict | None]:
    """Train and, if this is a trial, compare.

    Returns the training's outcome and, on the main rank of a trial that was not interrupted, the content of trial.json.
    """
    planned = None if config.trial.plan == "off" else lambda other: forecast(other, ranks)
    outcome = train(config, folder, ranks, facts, say, planned)
    if not config.trial.trial or outcome.step < outcome.total_steps or not ranks.is_main:
        return outcome, None
    result = judge(config, folder, plan, outcome)
    folder.write_json("trial.json", result)
    return outcome, result


def judge(config: TrainConfig, folder: RunFolder, plan: FrozenPlan, outcome: Outcome) -> dict:
    """The content of trial.json from the plan and the run's metrics."""
    records = read_metrics(folder.metrics)[:config.trial.trial_steps]
    warmup = warmup_steps(len(records))
    measured = measure(records[warmup:], records, outcome.newest_file)
    rows = compare.compare(plan.content, measured)
    return {
        "plan_sha256": plan.sha256, "environment": json.loads((folder.path / "environment.json").read_text()),
        "steps": len(records), "warmup_steps": warmup, "rows": compare.as_dicts(rows), "verdict": compare.verdict(rows),
        "full_run": full_run(plan.content, records[warmup:]),
        "memory_by_phase": {"predicted": plan.content["memory"]["by_phase"], "measured": outcome.peak_by_phase},
    }


def warmup_steps(steps: int) -> int:
    """Steps left out of the timing: a tenth of the run, at least 3 and at most 50."""
    return min(max(3, min(50, steps // 10)), max(0, steps - 1))


def measure(steady: list[dict], records: list[dict], checkpoint_file: Path) -> dict[str, float | None]:
    """Figures of a run: medians of the time, maxima of the memory. None where no step measured one."""
    def values(key: str, of: list[dict]) -> list[float]:
        return [record[key] for record in of if record[key] is not None]

    def median(key: str) -> float | None:
        return statistics.median(found) if (found := values(key, steady)) else None

    def highest(key: str) -> float | None:
        return max(found) if len(found := values(key, records)) >= min(MEMORY_STEPS, len(records)) else None

    used = values("device_used_bytes", records)
    return {
        "step_seconds": median("step_seconds"), "images_per_second": median("images_per_second"), "mfu": median("mfu"),
        "peak_allocated_bytes": highest("peak_allocated_bytes"), "peak_reserved_bytes": highest("peak_reserved_bytes"),
        "device_used_bytes": max(used) if used else None,
        "checkpoint_bytes": checkpoint.size_of(checkpoint_file) or None,
    }


def full_run(plan: dict, steady: list[dict]) -> dict[str, object]:
    """Hours and cost of the whole run at the measured speed: its median, and its quartiles as low and high."""
    seconds = [record["step_seconds"] for record in steady if record["step_seconds"] is not None]
    steps = plan["run"]["steps"]
    if len(seconds) < 2:
        return {"steps": steps, "hours": {"low": None, "mid": None, "high": None}, "cost": None}
    low, mid, high = (steps * quartile / 3600 for quartile in statistics.quantiles(seconds, n=4))
    cost = plan["run"]["cost"]
    planned = plan["run"]["hours"]["mid"]
    return {"steps": steps, "hours": {"low": low, "mid": mid, "high": high},
            "cost": cost * mid / planned if cost is not None and planned else None}
