"""Hold this project's training step against a plain loop, and a step with instruments against one without.

    python scripts/benchmark.py          # small, the embedded digits: under a minute on two CPU cores
    python scripts/benchmark.py --model DiT-B/2 --amp --global-batch-size 32 --seconds 120 --json > step.json

All contenders live in one process and take turns, so that a change of the machine's speed meets all of them alike; what
counts is the ratio inside a round. Without --model and --config it is configs/digits.toml at batch 32; with --model the
data is synthetic unless --data says otherwise. The same micro-batches, made beforehand, go through every contender.

The plain loop is the one most people write: torch's AdamW with its defaults, a deep copy of the model as moving average
that is updated parameter by parameter, and ``loss.item()`` in every step. It runs with diffusers'
DiTTransformer2DModel, which keeps a copy of the timestep and label embedder in every block and so has more parameters,
and with this project's model, which separates the loop from the model: there both do the same arithmetic on the same
numbers. This project's step also measures the gradient's norm and skips a step that is not finite, which the plain loop
does not.
"""

import contextlib
import copy
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dit.cli import parse_flags, run, settle, take_flag
from dit.codec import Codec, build_codec
from dit.config import TrainConfig, UsageError, replace
from dit.config_files import load_toml, to_tree
from dit.data import build_dataset, micro_batches
from dit.diffusion import create_diffusion
from dit.metrics import Console, DeviceFacts, JsonLines, StepMeter
from dit.metrics_memory import MemoryWatch
from dit.model import build_model
from dit.parallel import Ranks, processes
from dit.precision import Precision, resolve
from dit.run_folder import environment
from dit.step import StepResult, build_parts, train_step
from dit.terminal import progress_bar

DIGITS = Path(__file__).parent.parent / "configs" / "digits.toml"
POOL_STEPS, WARMUP_STEPS = 4, 3  # so many steps' micro-batches are drawn beforehand and repeated
OURS, PLAIN_OURS, PLAIN_DIFFUSERS = ("this project's step", "plain loop, this project's model",
                                     "plain loop, diffusers' model")
METERED, WATCHED = "this project's step, metrics on", "this project's step, metrics and memory watch"


@dataclass(frozen=True)
class MeasureConfig:
    """Measurement"""

    rounds: int = 15
    """Rounds in which every contender has one turn; the spread comes from them. Fewer, but at least 3, are done where
    the machine turns out slower than expected."""
    seconds: float = 30.0
    """Seconds for all rounds together, after the warm-up. A turn has at least two steps."""
    clock: Literal["wall", "processor"] = "wall"
    """processor counts the time in which this process's threads run: for a CPU that others use too, and one thread."""
    json: bool = False
    """Print one JSON object, with environment, instead of the table."""

    @property
    def now(self) -> Callable[[], float]:
        return time.process_time if self.clock == "processor" else time.perf_counter


@dataclass(frozen=True)
class BenchmarkConfig(TrainConfig):
    """This project's training step against a plain loop with diffusers' model; instruments on against off.

    train.py's settings hold here too; --config FILE goes first.
    """

    measure: MeasureConfig = field(default_factory=MeasureConfig)


@dataclass(frozen=True)
class Contender:
    """Something that takes steps: ``turn(n)`` takes n of them and leaves no work behind on the device."""

    name: str
    parameters: int
    turn: Callable[[int], None]


def main(args: list[str]) -> int:
    config = configure(args)
    out = contextlib.redirect_stdout(sys.stderr) if config.measure.json else contextlib.nullcontext()
    try:
        with out:
            result = benchmark(config)
    except torch.OutOfMemoryError:
        raise UsageError("out of memory: three models with their optimizers are held at once; choose a smaller "
                         "--model or --global-batch-size, or --ckpt") from None
    print(json.dumps(result) if config.measure.json else table(result))
    return 0


def configure(args: list[str]) -> BenchmarkConfig:
    """The settings of the command line. Raises UsageError."""
    path, rest = take_flag(args, "--config")
    if path:
        base = load_toml(path)
    elif any(word.split("=")[0] == "--model" for word in rest):
        base = replace(TrainConfig(), data="synthetic")
    else:
        base = replace(load_toml(DIGITS), global_batch_size=32)
    config = settle(parse_flags(BenchmarkConfig, rest, BenchmarkConfig(**vars(base)), prog="benchmark.py"))
    if config.measure.rounds < 3:
        raise UsageError(f"--rounds {config.measure.rounds}: quartiles need at least 3")
    if not 0 < config.measure.seconds < float("inf"):
        raise UsageError(f"--seconds {config.measure.seconds}: must be a number above 0")
    height, width = config.shape.input_size
    if height != width:
        raise UsageError(f"--image-size {config.model.image_size}: diffusers' model is square; give one number")
    if config.checkpointed_blocks not in (0, config.shape.depth):
        raise UsageError(f"--ckpt-blocks {config.memory.ckpt_blocks}: diffusers' model checkpoints all blocks or none")
    config.micro_batch(1)
    return config


# ---- measuring ----

def benchmark(config: BenchmarkConfig) -> dict[str, object]:
    """Build the contenders, let them take turns, and return the content of ``--json``."""
    load_before = os.getloadavg()[0]
    with processes() as ranks, tempfile.TemporaryDirectory() as folder:
        if ranks.world_size > 1:
            raise UsageError("benchmark.py measures one device: start it with python, not with torchrun")
        contenders, metered, precision_name = build_contenders(config, ranks, Path(folder))
        steps, rounds = measure(contenders, config.measure)
        return {
            "schema": 1, "environment": environment(ranks.device, 1), "precision": precision_name,
            "load_average": {"before": load_before, "after": os.getloadavg()[0]},
            "config": {name: tree for name, tree in to_tree(config).items() if name not in ("run", "trial")},
            "clock": config.measure.clock, "rounds": len(rounds), "steps_per_turn": steps,
            **summarise(contenders, rounds, config.memory.global_batch_size),
            "instruments": instrument_costs(rounds, metered.host_seconds, config.run.log_every),
        }


def measure(contenders: list[Contender], config: MeasureConfig) -> tuple[int, list[dict[str, float]]]:
    """Returns the number of steps in a turn, and per round the seconds per step of every contender by name."""
    for contender in contenders:
        contender.turn(WARMUP_STEPS)
    one_round = sum(_seconds(contender, 2, time.perf_counter) for contender in contenders)
    steps = max(2, round(config.seconds / config.rounds / one_round))
    rounds, deadline = [], time.monotonic() + 1.5 * config.seconds
    with progress_bar("measuring") as progress:
        while len(rounds) < config.rounds and (len(rounds) < 3 or time.monotonic() < deadline):
            start = len(rounds) % len(contenders)
            order = (contenders[start:] + contenders[:start])[::1 if len(rounds) % 2 else -1]  # no fixed neighbours
            times = {}
            for contender in order:
                times[contender.name] = _seconds(contender, steps, config.now)
                progress(len(rounds) * len(contenders) + len(times), config.rounds * len(contenders))
            rounds.append(times)
    return steps, rounds


def _seconds(contender: Contender, steps: int, clock: Callable[[], float]) -> float:
    start = clock()
    contender.turn(steps)
    return (clock() - start) / steps


def summarise(contenders: list[Contender], rounds: list[dict[str, float]], batch: int) -> dict[str, object]:
    """Median and quartiles of every contender's time and of the ratios, which are taken inside the rounds."""
    def ratio(name: str, to: str) -> dict[str, float]:
        return spread([times[name] / times[to] for times in rounds])

    seconds = {each.name: spread([times[each.name] for times in rounds]) for each in contenders}
    return {
        "contenders": [{"name": each.name, "parameters": each.parameters, "step_seconds": seconds[each.name],
                        "images_per_second": batch / seconds[each.name]["median"], "time_ratio": ratio(each.name, OURS)}
                       for each in contenders],
        "comparisons": {"whole": ratio(PLAIN_DIFFUSERS, OURS), "loop": ratio(PLAIN_OURS, OURS),
                        "model": ratio(PLAIN_DIFFUSERS, PLAIN_OURS)},
    }


def instrument_costs(rounds: list[dict[str, float]], host_seconds: float, log_every: int) -> dict[str, object]:
    """What metrics and the memory watch cost of a step, as shares: 0.01 is one percent.

    ``metrics`` is timed on against off; ``metrics_host`` is the time spent inside the instruments themselves, which is
    below what on against off can resolve. The watched contender watches every step, the trainer one in ``log_every``.
    """
    watched = spread([(times[WATCHED] - times[METERED]) / times[OURS] for times in rounds])
    return {
        "metrics": spread([times[METERED] / times[OURS] - 1 for times in rounds]),
        "metrics_host_seconds": host_seconds,
        "metrics_host": host_seconds / statistics.median(times[OURS] for times in rounds),
        "watch_in_a_watched_step": watched, "log_every": log_every,
        "watch": {name: value / log_every for name, value in watched.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


# ---- contenders ----

def build_contenders(config: BenchmarkConfig, ranks: Ranks, folder: Path) -> tuple[list[Contender], "Metered", str]:
    """All contenders, with equal initial weights where the model is the same; ``folder`` takes the metrics."""
    device = ranks.device
    precision = resolve(config, device)
    codec = build_codec(config.vae if config.encodes_in_loop else "none", device=device,
                        chunk=config.data.encode_chunk)
    pool = micro_batch_pool(config, device)
    wrap = torch.compile if config.precision.compile else lambda model: model
    torch.manual_seed(config.run.global_seed)
    parts = build_parts(config, device, codec, precision, wrap=wrap)
    step = partial(train_step, parts, itertools.cycle(pool), config.memory.grad_accum, lr=config.optim.lr,
                   ema_decay=config.optim.ema_decay)
    metered = Metered(config, ranks, folder, step)
    contenders = [Contender(OURS, _count(parts.model), metered.bare_turn)]
    for name, build in ((PLAIN_OURS, build_ours), (PLAIN_DIFFUSERS, build_diffusers)):
        torch.manual_seed(config.run.global_seed)
        plain = PlainLoop(config, *build(config, device), wrap, codec, resolve(config, device), pool)
        contenders.append(Contender(name, _count(plain.model), plain.turn))
    contenders += [Contender(METERED, _count(parts.model), metered.turn),
                   Contender(WATCHED, _count(parts.model), partial(metered.turn, watched=True))]
    return contenders, metered, precision.name


def micro_batch_pool(config: TrainConfig, device: torch.device) -> list[dict[str, Tensor]]:
    """The micro-batches of the run's first steps, in (on a GPU: pinned) host memory."""
    batches = micro_batches(build_dataset(config), start_step=0, global_batch=config.memory.global_batch_size,
                            accumulation=config.memory.grad_accum)
    pool = list(itertools.islice(batches, POOL_STEPS * config.memory.grad_accum))
    if device.type == "cuda":
        pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
    return pool


def build_ours(config: TrainConfig, device: torch.device) -> tuple[nn.Module, Callable]:
    """This project's model, and how it is called: with (network, x, t, batch)."""
    with device:
        model = build_model(config.shape, checkpoint_blocks=config.checkpointed_blocks,
                            fused_attention=config.precision.attention != "math")
    return model, lambda network, x, t, batch: network(x, t, batch["y"], batch["drop"])


def build_diffusers(config: TrainConfig, device: torch.device) -> tuple[nn.Module, Callable]:
    """diffusers' model of the same size, and how it is called. It drops a tenth of the labels by itself, at random."""
    from diffusers import DiTTransformer2DModel

    shape = config.shape
    model = DiTTransformer2DModel(
        num_attention_heads=shape.num_heads, attention_head_dim=shape.hidden_size // shape.num_heads,
        in_channels=shape.in_channels, out_channels=shape.out_channels, num_layers=shape.depth,
        sample_size=shape.input_size[0], patch_size=shape.patch_size, num_embeds_ada_norm=shape.num_classes,
        norm_eps=1e-6, norm_num_groups=1).to(device)
    if config.checkpointed_blocks:
        model.enable_gradient_checkpointing()
    return model, lambda network, x, t, batch: network(x, timestep=t, class_labels=batch["y"]).sample


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PlainLoop:
    """The training loop most people write, around any of the two models."""

    def __init__(self, config: TrainConfig, model: nn.Module, call: Callable[..., Tensor],
                 wrap: Callable[[nn.Module], nn.Module], codec: Codec, precision: Precision,
                 pool: list[dict[str, Tensor]]):
        self.model = model.train()
        self._network = partial(call, wrap(model))
        self._average = copy.deepcopy(model).requires_grad_(False) if config.optim.ema != "off" else None
        self._decay, self._accumulation = config.optim.ema_decay, config.memory.grad_accum
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr,
                                            weight_decay=config.optim.weight_decay)
        self._diffusion = create_diffusion(learn_sigma=config.model.learn_sigma)
        self._codec, self._precision, self._clip_grad = codec, precision, config.optim.clip_grad
        self._batches = itertools.cycle(pool)
        self._device = next(model.parameters()).device
        self.losses: list[float] = []

    def turn(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self._step())
        _wait(self._device)

    def _step(self) -> float:
        scaler, total = self._precision.scaler, 0.0
        self._optimizer.zero_grad()
        for _ in range(self._accumulation):
            batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in next(self._batches).items()}
            latents = self._codec.encode(batch["x"], batch.get("posterior_noise"))
            with self._precision.autocast():
                network = partial(self._network, batch=batch)
                losses = self._diffusion.training_losses(network, latents, batch["t"], noise=batch["noise"])
                loss = losses["loss"].mean() / self._accumulation
            scaler.scale(loss).backward()
            total += loss.item()
        if self._clip_grad:
            scaler.unscale_(self._optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
        scaler.step(self._optimizer)
        scaler.update()
        if self._average is not None:
            with torch.no_grad():
                current = dict(self.model.named_parameters())
                for name, average in self._average.named_parameters():
                    average.mul_(self._decay).add_(current[name], alpha=1 - self._decay)
        return total


class Metered:
    """This project's step, bare or with the trainer's instruments: a record of every step, written after every turn."""

    def __init__(self, config: BenchmarkConfig, ranks: Ranks, folder: Path, step: Callable[..., StepResult]):
        self._device, self._step, self._lr, self._done = ranks.device, step, config.optim.lr, 0
        self._meter = StepMeter(ranks, config.memory.global_batch_size, DeviceFacts(1e9, 1e12))
        self._sinks = JsonLines(folder / "metrics.jsonl", 0), Console(lambda line: None, 10**6)
        self._watch = MemoryWatch(ranks.device)
        self.inside_seconds, self.metered_steps, self._now = 0.0, 0, config.measure.now

    def bare_turn(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        _wait(self._device)

    def turn(self, steps: int, watched: bool = False) -> None:
        self._meter.resume()
        inside = 0.0
        for _ in range(steps):
            result, memory = self._watch.run(lambda phase: self._step(phase=phase)) if watched else (self._step(), None)
            start = self._now()
            self._meter.add(self._done, result, lr=self._lr, data_wait_seconds=0.0, memory=memory)
            inside += self._now() - start
            self._done += 1
        _wait(self._device)
        start = self._now()
        records = self._meter.report()
        for sink in self._sinks:
            sink.write(records)
        if not watched:
            self.inside_seconds += inside + self._now() - start
            self.metered_steps += steps

    @property
    def host_seconds(self) -> float:
        """Seconds per step that this process has spent inside the instruments."""
        return self.inside_seconds / self.metered_steps


# ---- printing ----

def table(result: dict) -> str:
    """The result as people read it."""
    config, memory, machine = result["config"], result["config"]["memory"], result["environment"]
    ratios, cost, load = result["comparisons"], result["instruments"], result["load_average"]
    micro_batch = memory["global_batch_size"] // memory["grad_accum"]
    lines = [f"{config['model']['model']}, data {config['data']['data']}, micro-batch {micro_batch} x accumulation "
             f"{memory['grad_accum']}, {result['precision']}, on {machine['device']}, "
             f"{machine['cpu_threads']} CPU threads, torch {machine['versions']['torch']}",
             f"{result['rounds']} rounds of {result['steps_per_turn']} steps each, {result['clock']} time; medians, "
             f"quartiles in brackets; load average {load['before']:.1f} before, {load['after']:.1f} after", "",
             f"{'':46}{'parameters':>13}  {'ms per step':>24}  {'images/s':>9}  {'time / this step':>21}"]
    lines += [f"{each['name']:46}{each['parameters']:13,}  {_text(each['step_seconds'], 1e3, '.1f'):>24}  "
              f"{each['images_per_second']:9.1f}  {_text(each['time_ratio'], 1, '.3f'):>21}"
              for each in result["contenders"]]
    return "\n".join([
        *lines, "",
        f"the loop (same model): the plain one takes {_text(ratios['loop'], 1, '.3f')} times as long",
        f"the model (same plain loop): diffusers' takes {_text(ratios['model'], 1, '.3f')} times as long",
        f"metrics: on against off {_text(cost['metrics'], 100, '+.2f')} % of a step; inside the instruments "
        f"{1e3 * cost['metrics_host_seconds']:.2f} ms = {100 * cost['metrics_host']:.2f} %",
        f"memory watch: {_text(cost['watch'], 100, '+.2f')} % of a step with one step in {cost['log_every']} watched "
        f"(that step: {_text(cost['watch_in_a_watched_step'], 100, '+.0f')} %)"])


def _text(value: dict[str, float], factor: float, form: str) -> str:
    low, median, high = (format(factor * value[name], form) for name in ("low", "median", "high"))
    return f"{median} [{low}, {high}]"


if __name__ == "__main__":
    run(main)
