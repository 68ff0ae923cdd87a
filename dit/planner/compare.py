"""Predicted against measured, one row per quantity, and what both say about the whole run. Needs no torch."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One quantity, in its unit. ``ratio`` is measured / predicted; ``within`` says whether measured is in [low, high].

    Where nothing was measured, ``measured``, ``ratio`` and ``within`` are None and the row judges nothing.
    """

    quantity: str
    unit: str
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None
    ratio: float | None
    within: bool | None


ALLOCATED_TOLERANCE, RESERVED_TOLERANCE = 0.02, 0.05
"""Bytes are counted, not estimated: what a plan may be off by in allocated and reserved memory before it is wrong."""


def row(quantity: str, unit: str, predicted: float | None, low: float | None, high: float | None,
        measured: float | None) -> Row:
    """Compare one quantity; any of its figures may be None."""
    judged = None not in (low, high, measured)
    ratio = measured / predicted if measured is not None and predicted else None
    return Row(quantity, unit, predicted, low, high, measured, ratio, low <= measured <= high if judged else None)


def compare(plan: dict, measured: dict[str, float | None]) -> list[Row]:
    """Rows for everything a plan (plan.json) predicts of a step.

    ``measured`` may hold step_seconds, images_per_second, mfu, peak_allocated_bytes, peak_reserved_bytes,
    device_used_bytes and checkpoint_bytes; what is missing or None was not measured.
    """
    memory, time, used = plan["memory"], plan["time"], plan["memory"]["device_used_bytes"]
    step, batch = time["step_seconds"], plan["config"]["memory"]["global_batch_size"]

    def within(quantity: str, predicted: float | None, tolerance: float) -> Row:
        low, high = (None, None) if predicted is None else (predicted * (1 - tolerance), predicted * (1 + tolerance))
        return row(quantity, "bytes", predicted, low, high, measured.get(quantity))

    def rate(seconds: float | None) -> float | None:
        return batch / seconds if seconds else None

    rows = [
        within("peak_allocated_bytes", _peak_of_steps(memory), ALLOCATED_TOLERANCE),
        within("peak_reserved_bytes", memory["peak_reserved_bytes"], RESERVED_TOLERANCE),
        row("device_used_bytes", "bytes", used["mid"], used["low"], used["high"], measured.get("device_used_bytes")),
        row("step_seconds", "s", step["mid"], step["low"], step["high"], measured.get("step_seconds")),
        row("images_per_second", "1/s", time["images_per_second"], rate(step["high"]), rate(step["low"]),
            measured.get("images_per_second")),
        within("checkpoint_bytes", plan["disk"]["checkpoint_bytes"], ALLOCATED_TOLERANCE),
    ]
    if time["mfu"] is not None:
        low, high = (time["mfu"] * step["mid"] / step[end] for end in ("high", "low"))
        rows.append(row("mfu", "", time["mfu"], low, high, measured.get("mfu")))
    return rows


def _peak_of_steps(memory: dict) -> int:
    """The planned peak without the drawing of samples between steps: a step's meter does not see that."""
    if memory.get("peak_phase") != "sample":
        return memory["peak_allocated_bytes"]
    return max(size for phase, size in memory["by_phase"].items() if phase != "sample")


def verdict(rows: list[Row]) -> str:
    """"pass" if something was measured and everything measured is inside its interval, else "fail"."""
    judged = [each.within for each in rows if each.within is not None]
    return "pass" if judged and all(judged) else "fail"


def as_dicts(rows: list[Row]) -> list[dict[str, object]]:
    """Rows as trial.json holds them."""
    return [asdict(each) for each in rows]
