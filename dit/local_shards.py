"""This process's part of tensors that several processes hold between them (DTensors); a plain tensor is its own part.

What is elementwise (an average, a moment, a clipped gradient) is computed on the parts, exactly and without a message.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of ``tensor``, without its autograd history. It shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor (asked without importing them: one process has none)."""
    return hasattr(tensor, "device_mesh")


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all ``tensors`` taken as one vector, a plain scalar that is the same on every process.

    A collective for sharded ones: one sum of squares for each way in which they are sharded. The host never waits for
    the device.
    """
    if not any(is_sharded(tensor) for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    alike: dict[tuple, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        key = ()
        if is_sharded(tensor):
            mesh = tensor.device_mesh
            key = tuple(mesh.get_group(dim) for dim, place in enumerate(tensor.placements) if not place.is_replicate())
        alike[key].append(local(tensor))
    squares = []
    for groups, parts in alike.items():
        square = torch.nn.utils.get_total_norm(parts) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def clip_by_norm(tensors: Sequence[Tensor], largest: float, norm: Tensor) -> None:
    """Scale ``tensors``, whose ``total_norm`` is ``norm``, so that it becomes at most ``largest``; in place."""
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local(tensor) for tensor in tensors], factor)
