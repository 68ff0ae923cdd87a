"""Numbers that go wrong: steps that were skipped are counted, and a run of them ends with a diagnosis."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from dit import checkpoint
from dit.config import OptimConfig
from dit.local_shards import is_sharded, local
from dit.parallel import Ranks
from dit.step import StepParts, mean_loss

LOSS_SCALE_FLOOR = 1.0
"""A loss scale this low that still overflows means gradients beyond fp16's range whatever the scale."""


class Diverged(RuntimeError):
    """The numbers went wrong for good. The message says where, what is left and what may help."""

    exit_code = 3


class BadSteps:
    """Counts the skipped steps of the records it is shown, and says when it is enough."""

    def __init__(self, config: OptimConfig, scales_loss: bool):
        self._most, self._scales_loss = config.max_bad_steps, scales_loss
        self.in_a_row, self.last, self._at_floor = 0, None, False

    def see(self, records: list[dict[str, object]]) -> None:
        """Records of further steps, in order. All ranks see the same."""
        for record in records:
            bad = record["skipped"] or record["loss"] is None
            self.in_a_row = self.in_a_row + 1 if bad else 0
            self.last = record["step"] if bad else self.last
            self._at_floor = self._scales_loss and bool(bad) and record["loss_scale"] <= LOSS_SCALE_FLOOR

    @property
    def verdict(self) -> str | None:
        """Why the run must stop, or None."""
        if self._at_floor:
            return f"step {self.last} overflowed with the loss scale at its floor of {LOSS_SCALE_FLOOR:g}"
        if self.in_a_row >= self._most:
            first = self.last - self.in_a_row + 1
            return (f"steps {first} to {self.last} ({self.in_a_row} in a row, --max-bad-steps {self._most}) had a loss "
                    "or gradient that is not finite; they were skipped")
        return None


def diagnosis(verdict: str, parts: StepParts, batches: Iterator[dict[str, Tensor]], accumulation: int, ranks: Ranks,
              folder: Path) -> str:
    """What to tell about a run that stops: the verdict, where the first number goes wrong, and the last good file.

    ``batches`` are this rank's micro-batches of the last bad step. A collective: every rank looks at its own.
    """
    found = next(filter(None, (first_not_finite(parts, next(batches), ranks) for _ in range(accumulation))), None)
    where = f"first not finite: {found}" if found else "a repetition of the step finds every number finite"
    path, _ = checkpoint.newest_valid(folder) if ranks.is_main else (None, [])
    left = f"the last good file is {path}" if path else "no checkpoint file had been written"
    return f"{verdict}; {where}; {left}. Try a lower --lr, --clip-grad 1 or --amp-dtype bf16"


def first_not_finite(parts: StepParts, batch: dict[str, Tensor], ranks: Ranks) -> str | None:
    """Repeat the forward of a micro-batch, then its backward, and name the first place whose numbers are not finite.

    That is the data, the VAE, the first module by order of execution, the loss, or the first gradient on the way back;
    None where all are finite. Weights stay as they are. A collective, the same on every rank: a model that is spread
    over them computes only where all take part, so that each goes all the way whatever it has found itself.
    """
    batch = {name: tensor.to(parts.device) for name, tensor in batch.items()}
    bare = dataclasses.replace(parts, network=parts.model)  # without DDP's exchange
    latents, place = _look_at_forward(bare, batch)
    if (said := _first_place(ranks.gather(place))) is not None:
        return said
    named = [(name, parameter) for name, parameter in parts.model.named_parameters() if parameter.requires_grad]
    is_spread = any(is_sharded(parameter) for _, parameter in named)
    loss = parts.precision.scaler.scale(mean_loss(bare, latents, batch))
    if is_spread:  # the parts of the sums over ranks, where autograd.grad would give what has not been exchanged
        loss.backward()
        gradients = [parameter.grad for _, parameter in named]
        parts.optimizer.zero_grad(set_to_none=True)
    else:
        gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    backwards = list(enumerate(zip(named, gradients)))[::-1]
    own = next((index for index, (_, gradient) in backwards if gradient is not None and not _is_finite(gradient)), -1)
    indices = ranks.gather(own)
    last = max(indices)
    if last < 0:
        return None
    place = f"the gradient of {named[last][0]}"
    return place if is_spread else _first_place([place if index == last else None for index in indices])


def _look_at_forward(parts: StepParts, batch: dict[str, Tensor]) -> tuple[Tensor, str | None]:
    """The latents of a micro-batch, and the first place of its forward that is not finite on this rank."""
    latents = parts.codec.encode(batch["x"], batch.get("posterior_noise"))
    with _first_bad_output(parts.model) as bad, torch.no_grad():
        loss = mean_loss(parts, latents, batch)
    if not _is_finite(batch["x"]):
        return latents, "the data"
    if not _is_finite(latents):
        return latents, "the VAE's latents"
    if bad:
        return latents, f"the output of {bad[0]}"
    return latents, None if _is_finite(loss) else "the loss, of finite outputs"


def _first_place(places: list[str | None]) -> str | None:
    """The place that the first rank with one names, and the rank, where there are several and not all agree."""
    rank, place = next(((rank, place) for rank, place in enumerate(places) if place is not None), (None, None))
    if place is None or places.count(place) == len(places):
        return place
    return f"{place} on rank {rank}"


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the list gets the names of modules whose output is not finite, in the order in which they finish."""
    bad: list[str] = []

    def look(name: str, output: object) -> None:
        if isinstance(output, Tensor) and not _is_finite(output):
            bad.append(name or "the model")

    hooks = [module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
             for name, module in model.named_modules()]
    try:
        yield bad
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(tensor: Tensor) -> bool:
    """Whether this process's part of a tensor is finite."""
    return bool(torch.isfinite(local(tensor)).all())
