"""What one device has been measured to do: seconds of an operation from its work, kept between runs. Needs no torch.

``scripts/calibrate.py`` measures single operations and the steps of small models, :func:`fit` turns that into a
:class:`Calibration`, :func:`load` finds it again. A step to be planned is never among what is fitted: the models that
are measured are fixed, and small.
"""

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from dit.planner.cache import folder
from dit.planner.op_class import Work

FORMAT = 2
BANDWIDTH_OCTAVES = 0.8  # how far a measured product's rate reaches, in factors of two of each of its sizes
FAR = 8  # beyond so many times the largest size measured of a kernel, its class decides
PRIOR_WEIGHT = 0.02  # of a GPU's prior, as a share of all measured seconds
SPREAD_FLOOR = 0.05  # no interval is narrower: runs of the same step differ by as much
Row = tuple[float, ...]  # the numbers of Work.size, then seconds


@dataclass(frozen=True)
class Step:
    """A measured step, phase by phase: works and seconds of its operations, seconds of phases as a whole, and by what
    share whole steps differ from each other.
    """

    name: str
    phases: Sequence[str]
    works: Sequence[Work]
    seconds: Sequence[float]
    phase_seconds: Mapping[str, float]
    noise: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Measured constants of a device, or the catalogue's priors (``kind`` "prior", nothing measured).

    ``rows`` gives per key of Work the measured sizes and seconds. Around operations, a phase takes ``per_op`` seconds
    for each one (interpreter, autograd) and ``per_byte`` seconds for each byte moved (memory given back). ``factors``
    are measured seconds over the prior's, per class, where a device is calibrated relative to its catalogue entry.
    ``spread`` is the half-width of a plan's interval, in logarithms. ``data`` are the loader's seconds per micro-batch,
    per sample and per number drawn.
    """

    kind: str
    source: str
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict, repr=False)
    classes: Mapping[str, str] = field(default_factory=dict, repr=False)
    per_op: Mapping[str, float] = field(default_factory=dict)
    per_byte: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.15
    data: Mapping[str, float] = field(default_factory=dict)
    residuals: Mapping[str, float] = field(default_factory=dict)
    _memo: dict = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, work: Work) -> float:
        """Seconds of one operation on the measured device. ValueError where nothing like it was measured."""
        memo = (work.key, work.size)
        if memo not in self._memo:
            self._memo[memo] = self._seconds(work)
        return self._memo[memo]

    def _seconds(self, work: Work) -> float:
        if work.cls == "view":
            return 0.0
        table = self._table(work.key, work.cls, len(work.size))
        if len(work.size) == 1:
            if work.size[0] > FAR * table[:, 0].max():  # a scalar's time says nothing of a large tensor's
                table = self._table(" " + work.key.rsplit(" ", 1)[1], work.cls, 1)
            return _on_curve(table, work.size[0])
        if work.cls in ("optimizer", "ema"):
            return _multi_tensor(table, work.size)
        return _by_rate(table, work.size)

    def _table(self, key: str, cls: str, dimensions: int) -> np.ndarray:
        """Measured rows for a key; where there are none, of the same kernel in another dtype, then of its class."""
        memo = ("table", key, cls, dimensions)
        if memo not in self._memo:
            kernel, dtype = key.rsplit(" ", 1)
            candidates = ([key], [k for k in self.rows if k.rsplit(" ", 1)[0] == kernel],
                          [k for k in self.rows if self.classes[k] == cls and k.endswith(dtype)],
                          [k for k in self.rows if self.classes[k] == cls],
                          [k for k in self.rows if self.classes[k] == "elementwise"])
            for keys in candidates:
                rows = [row for k in keys for row in self.rows.get(k, ()) if len(row) == dimensions + 1]
                if rows:
                    break
            else:
                raise ValueError(f"the calibration has no measurement like {key}; run scripts/calibrate.py")
            self._memo[memo] = np.array(rows)
        return self._memo[memo]


PRIORS = Calibration("prior", "catalogue peaks and published efficiencies (dit/planner/priors.py)", spread=0.20)


# ---- from measured rows to seconds ----

def _on_curve(rows: np.ndarray, size: float) -> float:
    """Seconds by interpolation in logarithms; proportional to size above what was measured, constant below."""
    bins = np.round(np.log2(rows[:, 0]) * 2)
    knots = [(np.median(np.log(rows[bins == b, 0])), np.median(np.log(rows[bins == b, 1]))) for b in np.unique(bins)]
    x, y = np.array(knots).T
    y = np.maximum.accumulate(y)
    log_size = math.log(size)
    return math.exp(y[-1] + log_size - x[-1] if log_size > x[-1] else float(np.interp(log_size, x, y)))


def _multi_tensor(rows: np.ndarray, size: Sequence[float]) -> float:
    """Seconds as a sum of a time per tensor and a time per byte, both not negative, fitted to relative errors.

    One more equation says that a gigabyte takes about a tenth of a second, where small tensors alone were measured.
    """
    table = np.vstack([rows[:, :2] / rows[:, 2:], [0.0, 0.1 * 1e9 / 0.1]])
    per_tensor, per_byte = non_negative(table, np.array([1.0] * len(rows) + [0.1]))
    return float(per_tensor * size[0] + per_byte * size[1])


def _by_rate(rows: np.ndarray, size: Sequence[float]) -> float:
    """Seconds from the rates of measured neighbours, weighted by how near their sizes are."""
    sizes, seconds = rows[:, :-1], rows[:, -1]
    distances = np.log2(sizes / np.array(size)) / BANDWIDTH_OCTAVES
    squared = (distances**2).sum(axis=1)
    weights = np.exp(-0.5 * (squared - squared.min()))
    log_rate = np.average(np.log(np.prod(sizes, axis=1) / seconds), weights=weights)
    return math.exp(math.log(math.prod(size)) - log_rate)


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients that are not negative: columns that would be are left out in turn."""
    active = list(range(matrix.shape[1]))
    solution = np.zeros(matrix.shape[1])
    while active:
        values = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if (values >= 0).all():
            solution[active] = values
            break
        active.pop(int(np.argmin(values)))
    return solution


# ---- fitting ----

def fit(source: str, steps: Sequence[Step], singles: Iterable[tuple[Work, float]],
        data: Mapping[str, float] | None = None) -> Calibration:
    """A calibration from measured steps and single operations.

    ``residuals`` are predicted over measured seconds of each step by a calibration fitted without it, less one; their
    median and the machine's noise give the interval.
    """
    singles = list(singles)
    whole = _fit(source, steps, singles)
    residuals = {}
    for step in steps:
        others = _fit(source, [other for other in steps if other is not step], singles)
        residuals[step.name] = step_seconds(others, step.phases, step.works) / sum(step.phase_seconds.values()) - 1
    typical = float(np.median([abs(math.log1p(value)) for value in residuals.values()])) if residuals else 0.1
    noise = float(np.median([math.log1p(step.noise) for step in steps])) if steps else 0.0
    spread = max(SPREAD_FLOOR, 2 * typical) + noise
    return dataclasses.replace(whole, _memo={}, spread=spread, residuals=residuals, data=dict(data or {}))


def fit_factors(classes: Sequence[str], measured: Sequence[float], prior: Sequence[float]) -> dict[str, float]:
    """Per class, measured over prior seconds: the median of operations weighted by time, drawn towards 1.

    Each class starts with a vote for 1 that weighs PRIOR_WEIGHT of all measured seconds.
    """
    factors, total = {}, sum(measured)
    for cls in set(classes):
        votes = sorted((s / p, s) for c, s, p in zip(classes, measured, prior, strict=True) if c == cls and p > 0)
        weight = sum(seconds for _, seconds in votes)
        if weight:
            middle, passed = weight / 2, np.cumsum([seconds for _, seconds in votes])
            median = votes[int(np.searchsorted(passed, middle))][0]
            factors[cls] = float(math.exp(math.log(median) * weight / (weight + PRIOR_WEIGHT * total)))
    return factors


def _fit(source: str, steps: Sequence[Step], singles: Sequence[tuple[Work, float]]) -> Calibration:
    rows: dict[str, list[Row]] = defaultdict(list)
    classes: dict[str, str] = {}
    measured = [*singles, *((w, s) for step in steps for w, s in zip(step.works, step.seconds, strict=True))]
    for work, seconds in measured:
        if work.cls != "view":
            rows[work.key].append((*work.size, seconds))
            classes[work.key] = work.cls
    bare = Calibration("measured", source, {key: _merged(table) for key, table in rows.items()}, classes)
    per_op, per_byte = _around(steps)
    return Calibration("measured", source, bare.rows, classes, per_op, per_byte)


def _merged(rows: Sequence[Row]) -> tuple[Row, ...]:
    """One row per size: the median of what was measured."""
    by_size: dict[Row, list[float]] = defaultdict(list)
    for *size, seconds in rows:
        by_size[tuple(size)].append(seconds)
    return tuple((*size, float(np.median(values))) for size, values in sorted(by_size.items()))


def _around(steps: Sequence[Step]) -> tuple[dict[str, float], dict[str, float]]:
    """Per phase, what time per operation and per written byte explains the time outside the operations."""
    per_op, per_byte = {}, {}
    for phase in {phase for step in steps for phase in step.phases}:
        equations = []
        for step in steps:
            inside = [(w, s) for p, w, s in zip(step.phases, step.works, step.seconds, strict=True) if p == phase]
            total = step.phase_seconds.get(phase, 0.0)
            if inside and total:
                kernels = sum(s for w, s in inside if w.cls != "view")  # a view's time is the interpreter's
                equations.append((len(inside) / total, sum(w.bytes for w, _ in inside) / total, 1 - kernels / total))
        table = np.array(equations)
        scale = np.abs(table[:, :2]).max(axis=0) + 1e-30
        per_op[phase], per_byte[phase] = (float(v) for v in non_negative(table[:, :2] / scale, table[:, 2]) / scale)
    return per_op, per_byte


def phase_seconds(calibration: Calibration, phases: Sequence[str], work: Sequence[Work]) -> dict[str, float]:
    """Seconds per phase of a step on a device calibrated by measured operations."""
    seconds: dict[str, float] = defaultdict(float)
    for phase, each in zip(phases, work, strict=True):
        seconds[phase] += (calibration.seconds(each) + calibration.per_op.get(phase, 0.0)
                           + calibration.per_byte.get(phase, 0.0) * each.bytes)
    return dict(seconds)


def step_seconds(calibration: Calibration, phases: Sequence[str], work: Sequence[Work]) -> float:
    """Seconds of a whole step on a device calibrated by measured operations."""
    return sum(phase_seconds(calibration, phases, work).values())


# ---- keeping ----

def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def path_of(device_name: str, threads: int | None) -> Path:
    """Where the calibration of a device is kept: by its name, torch's version, and threads on a CPU."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = ""
    said = json.dumps([FORMAT, device_name, torch_version, threads])
    slug = "".join(c if c.isalnum() else "-" for c in device_name.lower()).strip("-")
    return folder() / "calibration" / f"{slug}-{hashlib.sha256(said.encode()).hexdigest()[:12]}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write it whole or not at all."""
    values = {key: value for key, value in vars(calibration).items() if key != "_memo"}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"format": FORMAT, **values}))
    part.replace(path)


def load(path: Path) -> Calibration | None:
    """The calibration in a file; None where there is none that can be read."""
    try:
        values = json.loads(path.read_text())
        if values.pop("format") != FORMAT:
            return None
        values["rows"] = {key: tuple(map(tuple, rows)) for key, rows in values["rows"].items()}
        return Calibration(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(device_name: str, threads: int | None = None) -> Calibration | None:
    """The calibration of a device, if ``scripts/calibrate.py`` has run on it."""
    return load(path_of(device_name, threads))
