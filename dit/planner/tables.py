"""Advice and scaling for people: rows of text, a header first, and how they are drawn."""

from collections.abc import Sequence

from dit.config import SECTION_OF, TrainConfig, flag
from dit.planner import autocast_dtype
from dit.planner.candidates import Wish
from dit.planner.recommend import Advice
from dit.planner.scaling import Point, Scaling

COLUMNS_OF_THEIR_OWN = ("amp", "amp_dtype", "ckpt", "ckpt_blocks", "ckpt_every_nth", "grad_accum", "data_path", "model")


def advice_rows(advice: Advice) -> list[tuple[str, ...]]:
    """The table of an advice; the choice is marked with an asterisk."""
    header = ("", "devices", "micro-batch", "accumulation", "AMP", "checkpointed", "beyond what was asked", "ms/step",
              "hours (at most)", "cost (at most)", "memory GiB", "bound by")
    rows = [header]
    for each in advice.rows:
        config = each.config
        rows.append(("*" if each is advice.choice else "", f"{each.num_devices} x {each.device.name}",
                     str(each.micro_batch), str(config.memory.grad_accum),
                     autocast_dtype(config, each.device) or "no", f"{config.checkpointed_blocks}/{config.shape.depth}",
                     changes(each.asked or config, config) or "-", f"{1e3 * each.step_seconds:.0f}",
                     f"{each.hours[0]:.1f} ({each.hours[1]:.1f})", f"{each.cost[0]:.0f} ({each.cost[1]:.0f})",
                     f"{each.memory_bytes / 2**30:.1f}", each.time.bound_by))
    return rows


def changes(asked: TrainConfig, chosen: TrainConfig) -> str:
    """Settings that differ, as flags; not those that have a column, nor where data lie."""
    words = []
    for name, section in SECTION_OF.items():
        before, after = (getattr(getattr(config, section), name) for config in (asked, chosen))
        if name not in COLUMNS_OF_THEIR_OWN and before != after:
            words.append(f"{flag(name)} {after}")
    return " ".join(words)


def scaling_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """The table of a scaling: a row per number of devices."""
    rows = [("devices", "nodes", "global batch", "micro-batch", "accumulation", "memory", "ms/step", "images/s",
             "speed-up", "efficiency", "hours", "cost", "energy kWh", "waits for exchange")]
    for each in points:
        if each.step_seconds is None:
            rows.append((f"{each.num_devices:,}", str(each.num_nodes), f"{each.global_batch:,}", "less than 1",
                         *["-"] * 10))
            continue
        rows.append((f"{each.num_devices:,}", str(each.num_nodes), f"{each.global_batch:,}", str(each.micro_batch),
                     str(each.accumulation), each.verdict.replace("_", " "), f"{1e3 * each.step_seconds:,.1f}",
                     f"{each.images_per_second:,.0f}", f"{each.speed_up:,.2f}", f"{each.efficiency:.0%}",
                     f"{each.hours:,.1f}", "-" if each.cost is None else f"{each.cost:,.0f}",
                     "-" if each.energy_kwh is None else f"{each.energy_kwh:,.0f}", f"{each.exposed_share:.1%}"))
    return rows


def print_advice(advice: Advice, wish: Wish, seconds: float) -> None:
    """The trade-offs that are left, the choice, its reasons and the lines that start it, the last one alone."""
    console = _console()
    choice = advice.choice
    console.print(table(f"{choice.config.model.model}, {wish.steps:,} steps: the trade-offs left of "
                        f"{advice.num_candidates:,} configurations, searched in {seconds:.1f} s", advice_rows(advice)))
    for reason in advice.reasons:
        console.print(f"- {reason}", markup=False, soft_wrap=True)
    if advice.relax:
        console.print(f"NOT within the limits: {advice.relax}", markup=False, soft_wrap=True)
    for line in filter(None, (choice.extraction, choice.torchrun)):
        console.print(line, markup=False, soft_wrap=True)


def print_scaling(scaling: Scaling, config: TrainConfig, device_name: str) -> None:
    """Both tables, what is assumed, and where communication shows."""
    console, model = _console(), config.model.model
    batch = config.memory.global_batch_size
    console.print(table(f"{model} on {device_name}: the same global batch of {batch:,} on more devices (strong "
                        "scaling)", scaling_rows(scaling.strong)))
    console.print(table(f"{model} on {device_name}: the same micro-batch on more devices, as many images in all (weak "
                        "scaling)", scaling_rows(scaling.weak)))
    for note in (f"Assumed for the most devices: {scaling.node}.", *scaling.notes):
        console.print(f"- {note}", markup=False, soft_wrap=True)


def table(title: str, rows: Sequence[Sequence[str]]):
    """A table to print, with a header first; a row that starts with an asterisk stands out."""
    from rich.table import Table

    result = Table(title=title)
    for name in rows[0]:
        result.add_column(name, justify="right" if name else "left")
    for row in rows[1:]:
        result.add_row(*row, style="bold" if row[0] == "*" else None)
    return result


def _console():
    from rich.console import Console

    return Console(width=max(170, Console().width), highlight=False)
