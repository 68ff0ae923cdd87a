"""The training loop: it reads downwards and has one exit. Report, save, leave, step."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dit import checkpoint
from dit.codec import build_codec
from dit.config import TrainConfig
from dit.config_files import to_tree
from dit.data import build_dataset, micro_batches
from dit.ema import warmed_up_decay
from dit.metrics import Console, DeviceFacts, JsonLines, StepMeter, Tracker, duration
from dit.metrics_memory import MemoryWatch
from dit.optim import learning_rate
from dit.parallel import Ranks, StopVote, wrap_ddp
from dit.precision import resolve
from dit.preview import Preview
from dit.run_folder import RunFolder, device_name, environment
from dit.step import StepParts, build_parts, train_step

WATCHED_STEPS = 3
"""The memory of the first steps of every session is watched phase by phase, and then that of one step per report."""


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite. The message says where and what is left."""


@dataclass(frozen=True)
class Outcome:
    """How a session of training ended: after ``step`` of ``total_steps``, on a signal or (None) by itself.

    ``peak_by_phase`` is the largest sum of tensor bytes seen in each phase of the steps whose memory was watched.
    """

    step: int
    total_steps: int
    signal_number: int | None
    newest_file: Path
    peak_by_phase: dict[str, int]


class Interruption:
    """SIGINT, SIGTERM and SIGUSR1 ask the loop to save and leave; a second SIGINT ends the process at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __enter__(self) -> "Interruption":
        self.signal_number: int | None = None
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number


class TimedBatches:
    """The micro-batches, and the seconds this process has waited for them since last asked."""

    def __init__(self, batches: Iterator[dict[str, Tensor]]):
        self._batches, self._waited = batches, 0.0

    def __next__(self) -> dict[str, Tensor]:
        start = time.perf_counter()
        batch = next(self._batches)
        self._waited += time.perf_counter() - start
        return batch

    def take_wait(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited


def train(config: TrainConfig, folder: RunFolder, ranks: Ranks, facts: DeviceFacts,
          say: Callable[[str], None]) -> Outcome:
    """Train until the configured number of steps or a signal asks to leave; continue where the folder holds a run.

    ``say`` takes the lines people read; it is called on the main rank only. Raises UsageError for what the user can
    mend and Diverged when the numbers have gone wrong.
    """
    precision = resolve(config, ranks.device)
    dataset = build_dataset(config)
    codec = build_codec(config.vae if config.encodes_in_loop else "none", device=ranks.device,
                        chunk=config.data.encode_chunk)
    torch.manual_seed(config.run.global_seed)
    parts = build_parts(config, ranks.device, codec, precision, wrap=lambda model: _wrap(model, config, ranks))
    total = config.total_steps(len(dataset))
    step = first = _resume(config, folder, ranks, parts, say)
    if ranks.is_main:
        _introduce(config, folder, ranks, parts, say, step, total)
    accumulation, meter = config.memory.grad_accum, StepMeter(ranks, config.memory.global_batch_size, facts)
    loader = micro_batches(dataset, start_step=step, global_batch=config.memory.global_batch_size,
                           accumulation=accumulation, rank=ranks.rank, world_size=ranks.world_size,
                           num_workers=config.data.num_workers, pin_memory=ranks.device.type == "cuda")
    batches, vote, watch, bad_steps = TimedBatches(loader), StopVote(ranks), MemoryWatch(ranks.device), 0
    sinks = _sinks(config, folder, ranks, say, step, total)
    preview = Preview(config, folder, parts) if config.run.sample_every and ranks.is_main else None
    leaving = step >= total
    with Interruption() as interruption:
        meter.resume()
        while True:
            if leaving or step % config.run.log_every == 0:
                records = meter.report()
                for sink in sinks if records else ():
                    sink.write(records)
                bad_steps = _count_bad(records, bad_steps)
            if step > first and (leaving or step % config.run.ckpt_every == 0):
                _save(config, folder, ranks, parts, step, say)
                meter.resume()
            if preview is not None and step > first and step % config.run.sample_every == 0:
                say(f"samples: {preview(step)}")
                meter.resume()
            if bad_steps >= config.optim.max_bad_steps:
                raise Diverged(_diagnosis(step, bad_steps, folder))
            if leaving:
                break
            lr, decay = learning_rate(config.optim, step), warmed_up_decay(config.optim.ema_decay, step)
            take_step = partial(train_step, parts, batches, accumulation, lr=lr, ema_decay=decay)
            if step - first < WATCHED_STEPS or step % config.run.log_every == 0:
                result, memory = watch.run(lambda phase, take_step=take_step: take_step(phase=phase))
            else:
                result, memory = take_step(), None
            meter.add(step, result, lr=lr, data_wait_seconds=batches.take_wait(), memory=memory,
                      timed=memory is None or ranks.device.type == "cuda")
            step += 1
            leaving = vote(interruption.signal_number is not None) or step >= total
    vote.close()
    loader.close()
    for sink in sinks:
        sink.close()
    return Outcome(step, total, interruption.signal_number, checkpoint.path_of(folder.checkpoints, step),
                   watch.peak_by_phase)


def _wrap(model: nn.Module, config: TrainConfig, ranks: Ranks) -> nn.Module:
    network = wrap_ddp(model, ranks)
    return torch.compile(network) if config.precision.compile else network


def _sinks(config: TrainConfig, folder: RunFolder, ranks: Ranks, say: Callable[[str], None], step: int, total: int):
    if not ranks.is_main:
        return []
    sinks = [JsonLines(folder.metrics, step), Console(say, total)]
    if config.run.tracker != "none":
        settings = {f"{section}.{key}": value for section, table in to_tree(config).items()
                    for key, value in table.items()}
        sinks.append(Tracker(config.run.tracker, folder.path, settings))
    return sinks


# ---- saving and continuing ----

def _save(config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts, step: int, say) -> None:
    """Write the checkpoint file of ``step`` on the main rank; the others do not wait for it."""
    if not ranks.is_main:
        return
    start = time.perf_counter()
    path = checkpoint.path_of(folder.checkpoints, step)
    checkpoint.save(path, state_of(config, parts, step))
    checkpoint.prune(folder.checkpoints, config.run.keep_last, config.run.keep_every)
    say(f"saved {path}  {path.stat().st_size / 2**30:.2f} GiB in {duration(time.perf_counter() - start)}")


def state_of(config: TrainConfig, parts: StepParts, step: int) -> dict[str, object]:
    """Everything a run needs to go on, under the names of the official format and a few of our own."""
    model = parts.model.state_dict()
    state = {"model": model, "opt": parts.optimizer.state_dict(), "scaler": parts.precision.scaler.state_dict(),
             "step": step, "config": to_tree(config), "shape": checkpoint.shape_tree(config.shape)}
    if parts.ema is not None:
        state["ema"] = {**model, **parts.ema.state_dict()}
    return state


def _resume(config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts, say) -> int:
    """Load the newest valid checkpoint file, if any. Returns the number of steps already done."""
    path, skipped = ranks.broadcast(checkpoint.newest_valid(folder.checkpoints) if ranks.is_main else None)
    for line in skipped if ranks.is_main else ():
        say(line)
    if path is None:
        return 0
    state = checkpoint.load(path)
    checkpoint.load_weights(parts.model, state["model"], str(path))
    checkpoint.load_optimizer(parts.optimizer, state["opt"])
    if parts.ema is not None:
        parts.ema.load_state_dict(state["ema"])
    if state.get("scaler"):
        parts.precision.scaler.load_state_dict(state["scaler"])
    return state["step"]


# ---- what people read ----

def _introduce(config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts, say, step: int,
               total: int) -> None:
    """Write config.json and environment.json, and say what takes effect and how far the run is."""
    folder.write_json("config.json", to_tree(config))
    folder.write_json("environment.json", environment(ranks.device, ranks.world_size))
    micro, accumulation = config.micro_batch(ranks.world_size), config.memory.grad_accum
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    asked = config.precision.attention
    attention = "unfused (math)" if asked == "math" else f"fused ({asked})"
    say(f"{config.model.model}: {parameters:,} parameters, {config.shape.num_tokens} tokens of "
        f"{config.shape.hidden_size}; run folder {folder.path}")
    say(f"{ranks.world_size} x {device_name(ranks.device)} ({ranks.device.type}); {parts.precision.name}, "
        f"TF32 {'on' if parts.precision.tf32 else 'off'}, attention {attention}, "
        f"{config.checkpointed_blocks} of {config.shape.depth} blocks checkpointed, "
        f"compile {'on' if config.precision.compile else 'off'}, "
        f"loss scaling {'on' if parts.precision.scaler.is_enabled() else 'off'}")
    say(f"micro-batch {micro} x accumulation {accumulation} x {ranks.world_size} devices = "
        f"global batch {config.memory.global_batch_size}")
    say(f"step {step} of {total}, {total - step} to go")


def _count_bad(records: list[dict[str, object]], bad_steps: int) -> int:
    """Steps skipped in a row up to the last of ``records``."""
    for record in records:
        bad_steps = bad_steps + 1 if record["skipped"] or record["loss"] is None else 0
    return bad_steps


def _diagnosis(step: int, bad_steps: int, folder: RunFolder) -> str:
    path, _ = checkpoint.newest_valid(folder.checkpoints)
    left = f"the last good file is {path}" if path else "no checkpoint file had been written"
    first = step - bad_steps
    return (f"steps {first} to {step - 1} had a loss or gradient that is not finite; they were skipped and the weights "
            f"are those of step {first}; {left}. Try a lower --lr, --clip-grad 1 or --amp-dtype bf16")
