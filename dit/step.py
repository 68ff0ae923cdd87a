"""ONE optimizer step: the trainer runs it, the planner traces it.

A change here, in the model or in a toggle changes the plan by construction; there is no second description of a step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dit.codec import Codec
from dit.config import TrainConfig
from dit.diffusion import Diffusion, create_diffusion
from dit.ema import Ema
from dit.host_ema import HostEma
from dit.local_shards import clip_by_norm, total_norm
from dit.model import build_model
from dit.optim import build_optimizer, guarded_step, set_learning_rate
from dit.precision import Precision

Phase = Callable[[str], AbstractContextManager]
"""Given the name of a phase that begins, returns a context that lasts as long as the phase."""


def no_phase(name: str) -> AbstractContextManager:
    """The observer that observes nothing."""
    return nullcontext()


@dataclass
class StepParts:
    """What a step works on. ``network`` is ``model`` or its DDP or compiled wrapping; names are ``model``'s."""

    model: nn.Module
    network: nn.Module
    diffusion: Diffusion
    codec: Codec
    optimizer: torch.optim.Optimizer
    ema: Ema | HostEma | None
    precision: Precision
    clip_grad: float
    device: torch.device


@dataclass(frozen=True)
class StepResult:
    """Scalars of one step, fp32 tensors on the device, so that reading them is the caller's choice of moment.

    ``loss`` is this process's mean over its images; ``grad_norm`` is of the whole batch's gradient, before clipping;
    ``skipped`` is 1 where that norm was not finite and nothing was changed; ``loss_scale`` is the scaler's factor.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor


def build_parts(config: TrainConfig, device: torch.device, codec: Codec, precision: Precision,
                wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
                build_on: torch.device | None = None) -> StepParts:
    """Build everything a step needs on ``device``. ``wrap`` turns the model into the network (DDP, FSDP, compile).

    ``build_on`` is where the model is built if not there, for a ``wrap`` that brings it to ``device``.
    """
    with build_on or device:
        model = build_model(config.shape, checkpoint_blocks=config.checkpointed_blocks,
                            checkpoint_every=config.memory.ckpt_every_nth,
                            fused_attention=config.precision.attention != "math")
    model.train()
    network = wrap(model)
    ema = {"device": Ema, "host": HostEma, "off": lambda _: None}[config.optim.ema](model)
    return StepParts(model=model, network=network, diffusion=create_diffusion(learn_sigma=config.model.learn_sigma),
                     codec=codec, optimizer=build_optimizer(config.optim, model.parameters()), ema=ema,
                     precision=precision, clip_grad=config.optim.clip_grad, device=device)


def train_step(parts: StepParts, micro_batches: Iterator[dict[str, Tensor]], accumulation: int, *, lr: float,
               ema_decay: float, phase: Phase = no_phase) -> StepResult:
    """Take one step over the next ``accumulation`` micro-batches (dicts of tensors, see ``dit.data``).

    Nothing here waits for the device, except the multi-tensor optimizer (see ``guarded_step``).
    """
    loss_sum = torch.zeros((), device=parts.device)
    loss_scale = parts.precision.scaler.scale(torch.ones((), device=parts.device))
    for index in range(accumulation):
        with phase("data"):
            batch = {name: tensor.to(parts.device, non_blocking=True) for name, tensor in next(micro_batches).items()}
        with phase("encode"):
            latents = parts.codec.encode(batch["x"], batch.get("posterior_noise"))
        with _gradient_sync(parts.network, index == accumulation - 1):
            with phase("forward"):
                loss = mean_loss(parts, latents, batch) / accumulation
            with phase("backward"):
                parts.precision.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    with phase("optimizer"):
        if parts.ema is not None:
            parts.ema.hold_weights()
        grad_norm, skipped = _update(parts, lr)
    with phase("ema"):
        if parts.ema is not None:
            parts.ema.update(ema_decay, skipped)
    return StepResult(loss_sum, grad_norm, skipped, loss_scale)


def mean_loss(parts: StepParts, latents: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean loss of a micro-batch. Autocast covers the network alone; the loss is computed in fp32.

    A loss that is not finite makes every gradient NaN, so that all ranks see it in their norm and skip the step.
    """
    def network(x: Tensor, t: Tensor, **conditioning: Tensor) -> Tensor:
        with parts.precision.autocast():
            return parts.network(x, t, **conditioning)

    conditioning = {"y": batch["y"], "force_drop_ids": batch["drop"]}
    losses = parts.diffusion.training_losses(network, latents, batch["t"], conditioning, noise=batch["noise"])
    loss = losses["loss"].mean()
    return loss + 0.0 * loss * loss  # the loss itself, with its own gradient, unless it is infinite or NaN


def _update(parts: StepParts, lr: float) -> tuple[Tensor, Tensor]:
    """Unscale once, measure, clip, step, and drop the gradients. Returns (gradient norm, skipped)."""
    scaler, optimizer = parts.precision.scaler, parts.optimizer
    scaler.unscale_(optimizer)
    gradients = [parameter.grad for parameter in parts.model.parameters() if parameter.grad is not None]
    grad_norm = total_norm(gradients)
    skipped = (~torch.isfinite(grad_norm)).float()
    if parts.clip_grad:
        clip_by_norm(gradients, parts.clip_grad, grad_norm)
    set_learning_rate(optimizer, lr)
    guarded_step(optimizer, skipped)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, skipped


def _gradient_sync(network: nn.Module, is_last: bool) -> AbstractContextManager:
    """Let DDP or FSDP exchange gradients after the last micro-batch only; the forward belongs inside too."""
    if hasattr(network, "set_requires_gradient_sync"):
        network.set_requires_gradient_sync(is_last)
    return nullcontext() if is_last or not hasattr(network, "no_sync") else network.no_sync()
