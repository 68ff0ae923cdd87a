"""AdamW with moments in 8 or 4 bits (``--optimizer adamw-8bit``, ``adamw-4bit``), by torchao, imported when asked for.

A moment is stored as codes, one scale for each block of 256 (8 bits) or 128 (4 bits) numbers, and a table that says
what a code means (arXiv 2110.02861, 2309.01507): 2.03 or 1.06 bytes a parameter for both moments instead of 8. Tensors
of fewer than 4096 numbers, or not a whole number of blocks, stay fp32. On a GPU the step is compiled, once for each
shape of a parameter, in the first step; on a CPU it is not. The host waits for the device once a step, to know whether
to skip. The 4-bit table of squared gradients has no zero, so a parameter whose gradient is far below that of its block
moves less than it would, which slows the first hundred steps.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dit.config import OptimConfig, UsageError

BLOCK = {8: 256, 4: 128}
SMALLEST = 4096
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_low_bit(config: OptimConfig, trainable: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over ``trainable``, its moments allocated. Raises UsageError where torchao is missing.

    On the meta device there are plain tensors of the same bytes, torchao is not needed, and a step does nothing (the
    compiled step of a GPU keeps no temporaries).
    """
    bits = 8 if config.optimizer == "adamw-8bit" else 4
    return _on_meta(config, trainable, bits) if trainable[0].is_meta else build_torchao(config, trainable)


def build_torchao(config: OptimConfig, trainable: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torchao's optimizer on whatever device, meta too, where its step shows what a CPU would allocate."""
    bits = 8 if config.optimizer == "adamw-8bit" else 4
    try:
        from torchao import optim
    except ImportError:
        raise UsageError(f"--optimizer {config.optimizer} needs torchao; pip install torchao") from None
    kind = optim.AdamW8bit if bits == 8 else optim.AdamW4bit
    optimizer = kind(trainable, lr=config.lr, betas=(0.9, 0.999), weight_decay=config.weight_decay,
                     block_size=BLOCK[bits])
    for parameter in trainable:
        optimizer.state[parameter] = {"step": torch.tensor(0.0, device="cpu"),
                                      "exp_avg": optimizer._new_buffer(parameter, True),
                                      "exp_avg_sq": optimizer._new_buffer(parameter, False)}
    return _marked(optimizer)


def _marked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["low_bit"] = True
    return optimizer


def _on_meta(config: OptimConfig, trainable: Sequence[nn.Parameter], bits: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(trainable, lr=config.lr)
    optimizer.step = lambda: None
    for parameter in trainable:
        state, count = optimizer.state[parameter], parameter.numel()
        for moment in MOMENTS:
            if count >= SMALLEST and count % BLOCK[bits] == 0:
                state[f"{moment}_codes"] = torch.empty(count * bits // 8, dtype=torch.uint8, device="meta")
                state[f"{moment}_scale"] = torch.empty(count // BLOCK[bits], device="meta")
                state[f"{moment}_map"] = torch.empty(2**bits, device="meta")
            else:
                state[moment] = torch.empty_like(parameter)
    return _marked(optimizer)


def is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer was made by ``build_low_bit``."""
    return any(group.get("low_bit", False) for group in optimizer.param_groups)


def step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Take the step unless the scalar float tensor ``skip`` is 1, for which the host waits."""
    if not skip.is_meta and skip.item():
        return
    with torch.compiler.set_stance("force_eager") if skip.device.type != "cuda" else nullcontext():
        optimizer.step()


def packed(state: dict[str, object]) -> dict[str, object]:
    """An optimizer's state dict whose low-bit moments are dictionaries of plain tensors; any other as it is."""
    moments = {index: {name: _pack(value) for name, value in of.items()} for index, of in state["state"].items()}
    return {**state, "state": moments}


def _pack(value: object) -> object:
    if not hasattr(value, "codes"):
        return value
    return {"codes": value.codes, "scale": value.scale, "map": value.qmap}


def restore(target: Tensor, saved: Tensor | dict[str, Tensor]) -> None:
    """Copy a saved moment into a live one, whatever either is stored in; codes into codes of the same width exactly."""
    if not isinstance(saved, dict):
        target.copy_(saved.to(target.device))
    elif hasattr(target, "codes") and target.codes.shape == saved["codes"].shape:
        target.codes.copy_(saved["codes"])
        target.scale.copy_(saved["scale"])
    else:
        target.copy_(_unpack(saved).view(target.shape).to(target.device))


def _unpack(saved: dict[str, Tensor]) -> Tensor:
    """The numbers that codes stand for, flat; of two codes of 4 bits the first is the upper half of a byte."""
    codes = saved["codes"].flatten()
    if saved["map"].numel() == 16:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()
    return (saved["map"][codes.int()].view(saved["scale"].numel(), -1) * saved["scale"].view(-1, 1)).flatten()
