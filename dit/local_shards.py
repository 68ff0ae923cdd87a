"""This process's part of tensors that several processes hold between them (DTensors); a plain tensor is its own part.

What is elementwise (an average, a moment, a clipped gradient) is computed on the parts, exactly and without a message.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of ``tensor``, without its autograd history. It shares its memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():  # then this is the part itself, at no cost
        return tensor.to_local()


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


@dataclass(frozen=True)
class Pieces:
    """This process's parts of one tensor: boxes of a whole of ``size``, each with the offsets of its first element."""

    size: torch.Size
    boxes: dict[tuple[int, ...], Tensor]

    def copy_from(self, whole: Tensor) -> None:
        """Fill the parts from the whole tensor."""
        for offsets, box in self.boxes.items():
            region = tuple(slice(start, start + length) for start, length in zip(offsets, box.shape))
            box.copy_(whole[region])


def pieces(parameter: Tensor, part: Tensor) -> Pieces:
    """Where ``part`` (this process's part of a parameter, or of a moment or average like it) lies in the whole.

    A parameter's attribute ``fused_groups`` is for query, key and value under tensor parallelism: its rows are then in
    the order (group, query key value, row), and the whole is in the official order (query key value, group, row).
    """
    if not is_sharded(parameter):
        return Pieces(parameter.shape, {(0,) * parameter.ndim: part})
    boxes, fused_groups = {}, getattr(parameter, "fused_groups", 0)
    for chunk in parameter.__create_chunk_list__():
        if not part.numel():
            continue
        for start, rows, here in _official_rows(chunk.offsets[0], part.shape[0], parameter.shape[0], fused_groups):
            boxes[(start, *chunk.offsets[1:])] = part[here:here + rows]
    return Pieces(parameter.shape, boxes)


def _official_rows(first: int, count: int, total: int, fused_groups: int) -> Iterator[tuple[int, int, int]]:
    """Rows ``first`` to ``first + count`` as runs: (official first row, number of rows, first row within the part)."""
    if not fused_groups:
        yield first, count, 0
        return
    rows = total // (3 * fused_groups)
    row = first
    while row < first + count:
        run = row // rows
        length = min((run + 1) * rows, first + count) - row
        group, which = divmod(run, 3)
        yield (which * fused_groups + group) * rows + row % rows, length, row - first
        row += length
