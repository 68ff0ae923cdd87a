"""A tiny run of the project's own step on fixed data, for comparing ways of sharing it out over processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dit.codec import Codec, codec_spec
from dit.config import TrainConfig, replace
from dit.local_shards import is_sharded, local, pieces
from dit.parallel import Ranks
from dit.precision import resolve
from dit.sharding import wrapping
from dit.step import StepParts, build_parts, no_phase, train_step

TINY = replace(TrainConfig(), data="synthetic", model="custom", image_size=64, num_classes=10, depth=2, hidden_size=64,
               num_heads=4, patch_size=4, global_batch_size=8, lr=1e-3, clip_grad=0.5)
needs_fsdp = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"),
                                reason="torch 2.6 has FSDP for GPUs only")
"""For tests that spread a model over processes on the CPU."""
ONE = Ranks(0, 0, 1, torch.device("cpu"))
"""A process on its own."""


@dataclass
class Result:
    """What a run came to: (loss, grad_norm, skipped, loss scale) of every step, and whole tensors by name."""

    steps: list[tuple[float, ...]]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


def build(ranks: Ranks, config: TrainConfig) -> StepParts:
    torch.manual_seed(0)
    precision = resolve(config, ranks.device)
    return build_parts(config, ranks.device, Codec(codec_spec("none")), precision, *wrapping(config, ranks, precision))


def batches(config: TrainConfig, ranks: Ranks, first: int = 0) -> Iterator[dict[str, Tensor]]:
    """This rank's micro-batches from step ``first`` on; a step's images do not depend on how they are shared out."""
    size, data_ranks = config.memory.global_batch_size, config.data_ranks(ranks.world_size)
    rank, micro = ranks.rank * data_ranks // ranks.world_size, config.micro_batch(ranks.world_size)
    shape = config.latent_shape
    for step in range(first, 1000):
        generator = torch.Generator().manual_seed(step)
        whole = {"x": torch.randn(size, *shape, generator=generator),
                 "y": torch.randint(10, (size,), generator=generator),
                 "t": torch.randint(1000, (size,), generator=generator),
                 "noise": torch.randn(size, *shape, generator=generator),
                 "drop": torch.rand(size, generator=generator) < 0.1}
        for index in range(config.memory.grad_accum):
            start = (index * data_ranks + rank) * micro
            yield {name: tensor[start:start + micro] for name, tensor in whole.items()}


def run(ranks: Ranks, config: TrainConfig, num_steps: int = 4, phase: Callable = no_phase,
        parts: StepParts | None = None, first: int = 0) -> Result:
    """Train, and gather what it came to."""
    parts = parts or build(ranks, config)
    stream, steps = batches(config, ranks, first), []
    for _ in range(num_steps):
        result = train_step(parts, stream, config.memory.grad_accum, lr=config.optim.lr, ema_decay=0.5, phase=phase)
        loss = ranks.mean(result.loss.clone())
        steps.append((loss.item(), result.grad_norm.item(), result.skipped.item(), result.loss_scale.item()))
    return Result(steps, *wholes(parts))


def wholes(parts: StepParts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and averages as whole tensors. A collective where they are sharded."""
    named = dict(parts.model.named_parameters())
    averages = parts.ema.state_dict() if parts.ema is not None else {}
    return ({name: gather(local(parameter), parameter) for name, parameter in named.items()},
            {name: gather(average, named[name]) for name, average in averages.items()})


def gather(part: Tensor, like: Tensor) -> Tensor:
    """The whole of a tensor that is shared out as the parameter ``like`` is."""
    if not is_sharded(like):
        return part.detach().clone()
    boxes, whole = [None] * dist.get_world_size(), torch.full(like.shape, float("nan"))
    dist.all_gather_object(boxes, pieces(like, part).boxes)
    for offsets, box in (item for of_rank in boxes for item in of_rank.items()):
        whole[tuple(slice(start, start + length) for start, length in zip(offsets, box.shape))] = box
    return whole


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Length of the difference over length, all tensors taken as one vector."""
    assert one.keys() == other.keys() and one
    first, second = (torch.cat([tensors[name].double().flatten() for name in one]) for tensors in (one, other))
    return ((first - second).norm() / first.norm()).item()


def assert_alike(one: Result, other: Result, within: float = 1e-5) -> None:
    for before, after in zip(one.steps, other.steps, strict=True):
        assert abs(before[0] - after[0]) <= within * before[0] and abs(before[1] - after[1]) <= within * before[1]
        assert before[2:] == after[2:]
    assert distance(one.weights, other.weights) <= within
    assert distance(one.averages, other.averages) <= within
