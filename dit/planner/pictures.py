"""Two pictures of a plan: memory over the step by category, and what other toggles would need."""

from pathlib import Path

import numpy as np

from dit.config import TrainConfig, UsageError
from dit.planner import Plan, alternatives
from dit.planner.catalogue import GIB, MIB, Device
from dit.planner.memory import rounded
from dit.planner.trace import CATEGORIES, PHASES, Events

_COLOURS = {"parameters": "#4c72b0", "gradients": "#55a868", "optimizer": "#8172b3", "ema": "#64b5cd",
            "activations": "#dd8452", "temporaries": "#c44e52", "cast_copies": "#ccb974", "vae": "#937860",
            "batch": "#8c8c8c", "other": "#d0d0d0"}
_STEP = 2  # of the three that were traced: neither the first nor the last


def levels_by_category(events: Events) -> tuple[np.ndarray, list[tuple[str, int, int]]]:
    """Bytes (categories, events of one step) after each event, and the step's phases as (name, first, after last)."""
    spans = [(PHASES[phase], start, stop) for phase, start, stop, step in events.spans if step == _STEP]
    start, stop = spans[0][1], spans[-1][2]
    size = rounded(events.bytes)
    levels = np.stack([np.cumsum(np.where(events.category == index, size, 0))[start:stop]
                       for index in range(len(CATEGORIES))])
    return levels, [(name, first - start, last - start) for name, first, last in spans]


def draw(plan: Plan, config: TrainConfig, device: Device, num_devices: int, path: str) -> None:
    """Write both pictures into one PNG. Raises UsageError where it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    over_step, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_step(over_step, plan, device)
    _draw_alternatives(bars, config, device, num_devices)
    figure.suptitle(f"{config.model.model}, {plan.step.micro_batch} images per micro-batch, "
                    f"{num_devices} x {device.name}")
    _save(figure, path)


def draw_memory(plan: Plan, device: Device, path: str | Path) -> None:
    """Write the memory over the step alone, for a report. Raises UsageError where it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    _draw_step(figure.subplots(), plan, device)
    _save(figure, path)


def _save(figure, path: str | Path) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise UsageError(f"{path}: the picture cannot be written ({error.strerror or error})") from None


def _draw_step(axes, plan: Plan, device: Device) -> None:
    levels, phases = levels_by_category(plan.memory.events)
    unit, name = (GIB, "GiB") if levels.sum(axis=0).max() >= GIB else (MIB, "MiB")
    shown = [index for index in range(len(CATEGORIES)) if levels[index].max() > 0.002 * levels.sum(axis=0).max()]
    axes.stackplot(np.arange(levels.shape[1]), levels[shown] / unit, step="post",
                   labels=[CATEGORIES[index].replace("_", " ") for index in shown],
                   colors=[_COLOURS[CATEGORIES[index]] for index in shown])
    top = 1.12 * levels.sum(axis=0).max() / unit
    for number, (phase, first, last) in enumerate(phases):
        axes.axvspan(first, last, color="black", alpha=0.06 * (number % 2), linewidth=0)
        if last - first > 0.04 * levels.shape[1]:
            axes.text((first + last) / 2, 0.97 * top, phase, ha="center", va="top", fontsize=8)
    if device.memory_bytes / unit < top:
        axes.axhline(device.memory_bytes / unit, color="black", linestyle="--", linewidth=1)
    axes.set(xlim=(0, levels.shape[1]), ylim=(0, top), xlabel="allocations and frees of one step on a device, in order",
             ylabel=f"allocated, {name}")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.92), fontsize=8)


def _draw_alternatives(axes, config: TrainConfig, device: Device, num_devices: int) -> None:
    from matplotlib.patches import Patch

    found = list(alternatives.compare_toggles(config, device, num_devices))
    used = [each.memory.device_used_bytes for each in found]
    mid = np.array([each["mid"] for each in used]) / GIB
    spread = np.abs(np.array([[each[end] for each in used] for end in ("low", "high")]) / GIB - mid)
    colours = {"fits": "#55a868", "tight": "#ccb974", "does_not_fit": "#c44e52"}
    limit, top = device.memory_bytes / GIB, max(device.memory_bytes / GIB, (mid + spread[1]).max())
    axes.bar(range(len(found)), mid, yerr=spread, capsize=4, color=[colours[each.memory.verdict] for each in found])
    for place, height in enumerate(mid):
        axes.text(place, 0.01 * top, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    axes.text(-0.45, limit + 0.01 * top, f"{device.name}: {limit:.0f} GiB", ha="left", va="bottom", fontsize=8,
              bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1})
    axes.set_xticks(range(len(found)), [_tick(each.flags) for each in found], fontsize=8)
    axes.set(ylabel="in use on a device, GiB", ylim=(0, 1.12 * top),
             title="same micro-batch, other settings" + (f", all over {num_devices}" if num_devices > 1 else ""))
    axes.title.set_fontsize(9)
    axes.legend(handles=[Patch(color=colour, label=name.replace("_", " ")) for name, colour in colours.items()],
                loc="upper right", fontsize=7)


def _tick(flags: str) -> str:
    """What stands below a bar: one setting a line."""
    return flags.replace("--", "").replace(" ckpt", "\nckpt") if "fsdp" not in flags else flags.replace("--", "")
