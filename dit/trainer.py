"""The training loop: it reads downwards and has one exit. Report, save, leave, step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dit import checkpoint
from dit.codec import build_codec
from dit.config import TrainConfig
from dit.config_files import to_tree
from dit.data import PositionDataset, build_dataset, micro_batches
from dit.ema import warmed_up_decay
from dit.guards import BadSteps, Diverged, diagnosis
from dit.interruption import Interruption
from dit.metrics import Console, DeviceFacts, JsonLines, StepMeter, Tracker, records_since
from dit.metrics_memory import Memory, MemoryWatch
from dit.optim import learning_rate
from dit.parallel import Ranks, StopVote
from dit.precision import resolve
from dit.preview import Preview
from dit.pulse import Pulse
from dit.relief import Forecast, Relief, adapted
from dit.run_folder import RunFolder, changed_settings, device_name, environment
from dit.saving import Saver
from dit.sharded_saving import resume, saver_for
from dit.sharding import shards_model, spread_in_words, wrapping
from dit.step import StepParts, StepResult, build_parts, no_phase, train_step

WATCHED_STEPS = 3
"""The memory of the first steps of every session is watched phase by phase, and then that of one step per report."""


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


class Feed:
    """This rank's micro-batches, from any step and in any portions, and the seconds the loop has waited for them."""

    def __init__(self, config: TrainConfig, dataset: PositionDataset, ranks: Ranks):
        data_ranks = config.data_ranks(ranks.world_size)
        self._open = partial(micro_batches, dataset, global_batch=config.memory.global_batch_size,
                             rank=ranks.rank * data_ranks // ranks.world_size, world_size=data_ranks)
        self._num_workers, self._pin_memory = config.data.num_workers, ranks.device.type == "cuda"
        self._batches, self._waited = None, 0.0

    def start(self, step: int, accumulation: int) -> None:
        """The next micro-batch is the first of ``step``."""
        self.close()
        self._batches = self._open(start_step=step, accumulation=accumulation, num_workers=self._num_workers,
                                   pin_memory=self._pin_memory)

    def again(self, step: int, accumulation: int):
        """The micro-batches from ``step`` on a second time, read in this process."""
        return self._open(start_step=step, accumulation=accumulation)

    def __next__(self) -> dict[str, Tensor]:
        start = time.perf_counter()
        batch = next(self._batches)
        self._waited += time.perf_counter() - start
        return batch

    def take_wait(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


def train(asked: TrainConfig, folder: RunFolder, ranks: Ranks, facts: DeviceFacts, say: Callable[[str], None],
          forecast: Callable[[TrainConfig], Forecast] | None = None) -> Outcome:
    """Train until the configured number of steps or a signal asks to leave; continue where the folder holds a run.

    ``say`` takes the lines people read; it is called on the main rank only. ``forecast`` is the planner's word on other
    settings, for when memory runs out. Raises UsageError for what the user can mend, Diverged when the numbers have
    gone wrong, OutOfRoom when memory has run out and RankLost when another process has died.
    """
    config = adapted(asked, folder, ranks, say)
    precision = resolve(config, ranks.device)
    dataset = build_dataset(config)
    ranks.on_main(lambda: folder.keep_classes(dataset.source.class_names, config.run.resume_anyway))
    codec = build_codec(config.vae if config.encodes_in_loop else "none", device=ranks.device,
                        chunk=config.data.encode_chunk)
    torch.manual_seed(config.run.global_seed)
    parts = build_parts(config, ranks.device, codec, precision, *wrapping(config, ranks, precision))
    total, bad = config.total_steps(len(dataset)), BadSteps(config.optim, precision.scaler.is_enabled())
    step, bad.in_a_row = resume(folder, ranks, parts, say)
    first, saver, vote = step, saver_for(config, folder, ranks, parts, say), StopVote(ranks)
    if ranks.is_main:
        _introduce(asked, config, folder, ranks, parts, say, step, total)
        for note in dataset.notes:
            say(note)
    saver.check_room()
    feed, watch = Feed(config, dataset, ranks), MemoryWatch(ranks.device)
    pulse = Pulse(ranks, config.run.rank_timeout, saver.finish)
    relief = Relief(asked, config, folder, ranks, parts, pulse, feed, say, forecast)
    sinks = _sinks(config, folder, ranks, facts, say, step, total)
    draws = config.run.sample_every and (ranks.is_main or shards_model(config, ranks))
    preview = Preview(config, folder, parts, ranks.is_main) if draws else None
    feed.start(step, config.memory.grad_accum)
    signal_number = None
    meter, leaving = StepMeter(ranks, config.memory.global_batch_size, facts), step >= total
    with Interruption() as interruption, pulse:
        while True:
            saver.poll()
            saves = step > first and (leaving or step % config.run.ckpt_every == 0)
            if saves or leaving or step % config.run.log_every == 0:
                pulse.mark(step, "report")
                records = meter.report()
                bad.see(records)
                for sink in sinks if records else ():
                    sink.write(records)
            if saves:
                pulse.mark(step, "save")
                saver.save(step, bad.in_a_row)
                meter.resume()
            if config.run.sample_every and step > first and step % config.run.sample_every == 0:
                pulse.mark(step, "sample")
                line = f"samples: {preview(step)}" if preview is not None else ""
                if ranks.is_main:
                    say(line)
                meter.resume()
            if bad.verdict:
                accumulation = relief.config.memory.grad_accum
                text = diagnosis(bad.verdict, parts, feed.again(bad.last, accumulation), accumulation, ranks,
                                 folder.checkpoints)
                raise Diverged(text) if ranks.is_main else SystemExit(Diverged.exit_code)
            if leaving:
                break
            lr, decay = learning_rate(config.optim, step), warmed_up_decay(config.optim.ema_decay, step)
            watched = _is_watched(step - first, ranks) or step % config.run.log_every == 0
            result, memory = relief(partial(_take_step, parts, feed, step, lr, decay, pulse, saver,
                                            watch if watched else None))
            meter.add(step, result, lr=lr, data_wait_seconds=feed.take_wait(), memory=memory,
                      timed=memory is None or ranks.device.type == "cuda")
            step += 1
            pulse.mark(step, "vote")
            signal_number = vote(interruption.signal_number or 0) or None
            leaving = signal_number is not None or step >= total
        vote.close()
        saver.last(partial(pulse.mark, step, "save"))  # a failure here takes the other ranks along
        ranks.barrier()  # nobody is watched for a sign of life any more when the first one goes
    feed.close()
    for sink in sinks:
        sink.close()
    newest = next(iter(checkpoint.present(folder.checkpoints, step)), checkpoint.path_of(folder.checkpoints, step))
    return Outcome(step, total, signal_number, newest, watch.peak_by_phase)


def _is_watched(since: int, ranks: Ranks) -> bool:
    """Whether the memory of the session's step number ``since`` is measured: of the first ones, but on CPUs not of the
    second. There DDP makes its buckets anew, and the profiler, which never saw the old ones taken, does not see them
    go.
    """
    skips = ranks.device.type == "cpu" and ranks.world_size > 1
    return since - (skips and since > 1) < WATCHED_STEPS and not (skips and since == 1)


def _take_step(parts: StepParts, feed: Feed, step: int, lr: float, decay: float, pulse: Pulse, saver: Saver,
               watch: MemoryWatch | None, accumulation: int) -> tuple[StepResult, Memory | None]:
    """One optimizer step and, where it is watched, its memory."""
    def take(inner) -> StepResult:
        return train_step(parts, feed, accumulation, lr=lr, ema_decay=decay,
                          phase=saver.observe(pulse.observe(step, inner)))

    if watch is None:
        return take(no_phase), None
    if parts.device.type == "cpu":
        saver.finish()  # its copies are tensors on the CPU too, which the watch would count
    return watch.run(take)


def _sinks(config: TrainConfig, folder: RunFolder, ranks: Ranks, facts: DeviceFacts, say: Callable[[str], None],
           step: int, total: int):
    if not ranks.is_main:
        return []
    lines, every = JsonLines(folder.metrics, step), config.run.log_every
    sinks = [lines, Console(say, total, every, records_since(folder.metrics, step - step % every), facts)]
    if config.run.tracker != "none":
        settings = {f"{section}.{key}": value for section, table in to_tree(config).items()
                    for key, value in table.items()}
        sinks.append(Tracker(config.run.tracker, folder.path, settings))
    return sinks


# ---- what people read ----

def _introduce(asked: TrainConfig, config: TrainConfig, folder: RunFolder, ranks: Ranks, parts: StepParts, say,
               step: int, total: int) -> None:
    """Write config.json and environment.json, and say what takes effect and how far the run is."""
    for line in changed_settings(asked, folder.saved_config()):
        say(f"changed since the last session: {line}")
    folder.write_json("config.json", to_tree(asked))
    folder.write_json("environment.json", environment(ranks.device, ranks.world_size))
    micro, accumulation = config.micro_batch(ranks.world_size), config.memory.grad_accum
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    kernel = config.precision.attention
    attention = "unfused (math)" if kernel == "math" else f"fused ({kernel})"
    say(f"{config.model.model}: {parameters:,} parameters, {config.shape.num_tokens} tokens of "
        f"{config.shape.hidden_size}; run folder {folder.path}")
    say(f"{ranks.world_size} x {device_name(ranks.device)} ({ranks.device.type}); {parts.precision.name}, "
        f"TF32 {'on' if parts.precision.tf32 else 'off'}, attention {attention}, "
        f"{config.checkpointed_blocks} of {config.shape.depth} blocks checkpointed, "
        f"compile {'on' if config.precision.compile else 'off'}, "
        f"loss scaling {'on' if parts.precision.scaler.is_enabled() else 'off'}")
    if ranks.world_size > 1 or config.optim.ema != "device" or config.optim.optimizer != "adamw":
        say(f"{spread_in_words(config, ranks)}; optimizer {config.optim.optimizer}, average {config.optim.ema}")
    data_ranks, together = config.data_ranks(ranks.world_size), config.memory.tensor_parallel
    who = f"{data_ranks} devices" if together == 1 else f"{data_ranks} groups of {together} devices"
    say(f"micro-batch {micro} x accumulation {accumulation} x {who} = "
        f"global batch {config.memory.global_batch_size}")
    say(f"step {step} of {total}, {max(0, total - step)} to go")
