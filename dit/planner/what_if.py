"""Configurations side by side: what each costs, and the difference to the first in percent."""

import shlex
from collections.abc import Mapping, Sequence

from dit.cli import parse_flags, settle
from dit.config import TrainConfig
from dit.planner.catalogue import GIB

ROWS = {
    "verdict": lambda plan: plan["memory"]["verdict"].replace("_", " "),
    "memory in use (GiB)": lambda plan: plan["memory"]["device_used_bytes"]["mid"] / GIB,
    "allocated (GiB)": lambda plan: plan["memory"]["peak_allocated_bytes"] / GIB,
    "peak in phase": lambda plan: plan["memory"]["peak_phase"],
    "step (ms)": lambda plan: _times(1e3, plan["time"]["step_seconds"]["mid"]),
    "images/s": lambda plan: plan["time"]["images_per_second"],
    "hours": lambda plan: plan["run"]["hours"]["mid"],
    "cost": lambda plan: plan["run"]["cost"],
}
"""What is shown of a plan (plan.json), and how it is read from it; None is not known."""


def variants(texts: Sequence[str], base: TrainConfig) -> dict[str, TrainConfig]:
    """Settings of each text, a line of flags over ``base``; "" is ``base`` itself. Raises UsageError."""
    return {text or "(as given)": settle(parse_flags(TrainConfig, shlex.split(text), base, prog="plan.py --compare"))
            for text in texts}


def side_by_side(plans: Mapping[str, dict]) -> list[tuple[str, ...]]:
    """One row per quantity, one column per plan; numbers after the first column carry their difference in percent."""
    rows = []
    for name, read in ROWS.items():
        values = [read(plan) for plan in plans.values()]
        if any(value is not None for value in values):
            rows.append((name, *(_cell(value, values[0], index) for index, value in enumerate(values))))
    return rows


def _cell(value: float | str | None, first: float | str | None, index: int) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    text = f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
    has_difference = index > 0 and isinstance(first, int | float) and first
    return f"{text} ({value / first - 1:+.0%})" if has_difference else text


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
