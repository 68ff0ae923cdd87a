"""The optimizer and the learning rate's schedule."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dit import low_bit
from dit.config import OptimConfig


def build_optimizer(config: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the trainable ones of ``parameters``, its moments allocated at once.

    torch would allocate them in the first step; doing it here lets a run that cannot fit fail before it starts, and
    gives step 1 the memory of every later step.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if config.optimizer in ("adamw-8bit", "adamw-4bit"):
        return low_bit.build_low_bit(config, trainable)
    fused = config.optimizer == "adamw"
    groups: dict[object, list[nn.Parameter]] = {}  # one, except under tensor parallelism: a kernel takes one mesh
    for parameter in trainable:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=config.lr, betas=(0.9, 0.999),
                                  weight_decay=config.weight_decay, fused=fused and not trainable[0].is_meta,
                                  foreach=not fused or trainable[0].is_meta)
    for group in optimizer.param_groups:
        group.update(fused=fused, foreach=not fused)  # the meta device is only refused by the constructor's check
    for parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` from now on; where an optimizer keeps it as a tensor, it stays one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def guarded_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Take the optimizer's step unless the scalar float tensor ``skip`` is 1.

    The fused kernel reads ``skip`` on the device. The other ones cannot, so there the host waits for it.
    """
    if low_bit.is_low_bit(optimizer):
        low_bit.step(optimizer, skip)
    elif optimizer.param_groups[0]["fused"]:
        optimizer.found_inf, optimizer.grad_scale = skip, None
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
    elif skip.is_meta or not skip.item():
        optimizer.step()


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of step ``step`` (from 0): linear warm-up to ``lr``, then constant, as in the paper."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr
