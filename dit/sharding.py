"""Models that outgrow one device: FSDP2 over blocks (``--parallel fsdp``), within nodes (``--shard-size``).

Tensor parallelism (``dit.tensor_parallel``) goes below it: the weights of a block that FSDP shares out are then those
of one device's part of the block. Without fsdp, FSDP with one shard keeps the copies alike.

What lives on a device, and when, for N devices that hold one model between them (P parameters, P_b of them in a block,
R outside of the blocks: embedders, position table, final layer):

- always: 1/N of weights, moments and average, fp32; a tensor's rows are dealt out, so a tensor of fewer rows than N
  leaves some devices without any. Between backward and optimizer, 1/N of the gradients, fp32.
- R, whole, fp32: from the start of the forward to the end of the backward (``reshard_after_forward`` is False there).
- a block's weights, whole, in the dtype of ``--amp`` (fp32 without): while the block runs, forward and backward. The
  host runs ahead of the device, so the next block's weights are gathered while this one computes: two blocks' weights,
  and the flat receiving buffer of one more gather (P_b again) before it is split. In the backward the same, in reverse.
- a block's gradients, whole, in that dtype: from its backward to its reduction, in fp32 buffers of P_b (sent) and
  P_b/N (received); the reduction of one block runs beside the backward of the next.
- with accumulation: gradients of all but the last micro-batch are not exchanged, so all P of them stay whole, fp32,
  from the first micro-batch to the last.

Autocast casts the weights of a block's Linear layers to its dtype anyway; here they are cast before they are gathered,
which halves the messages and changes no number. Weights outside of the blocks are gathered in fp32, because some are
added (position table, label embedding) and autocast leaves those as they are. Reductions are in fp32 always.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dit.config import TrainConfig, UsageError
from dit.local_shards import is_sharded, local, pieces
from dit.parallel import Ranks, wrap_ddp
from dit.precision import Precision
from dit.tensor_parallel import mark_fused, parallelize


def shards_model(config: TrainConfig, ranks: Ranks) -> bool:
    """Whether this run's weights are spread over processes."""
    return ranks.world_size > 1 and (config.memory.parallel == "fsdp" or config.memory.tensor_parallel > 1)


def spread_in_words(config: TrainConfig, ranks: Ranks) -> str:
    """How the model is spread over devices, for people."""
    if not shards_model(config, ranks):
        return "a whole model on each device (ddp)" if ranks.world_size > 1 else "the model on one device"
    together, data_ranks = config.memory.tensor_parallel, config.data_ranks(ranks.world_size)
    shards = (config.memory.shard_size or data_ranks) if config.memory.parallel == "fsdp" else 1
    return f"model copies {data_ranks // shards} x shards {shards} x tensor parallel {together}"


def wrapping(config: TrainConfig, ranks: Ranks,
             precision: Precision) -> tuple[Callable[[nn.Module], nn.Module], torch.device | None]:
    """How this run's model becomes its network, and where it is built if not on the device: for ``build_parts``."""
    if shards_model(config, ranks):
        return lambda model: shard(model, config, ranks, precision.dtype), torch.device("meta")

    def wrap(model: nn.Module) -> nn.Module:
        network = wrap_ddp(model, ranks)
        return torch.compile(network) if config.precision.compile else network

    return wrap, None


def shard(model: nn.Module, config: TrainConfig, ranks: Ranks, dtype: torch.dtype | None) -> nn.Module:
    """Spread a model built on the meta device over the processes, give it memory and its initial weights.

    ``dtype`` is autocast's (None: none). The weights are those of the whole model made on ``ranks.device`` with the
    same seed; it never exists at once: a device holds its part and one tensor. Returns ``model``, changed in place. A
    collective. Raises UsageError where devices do not divide, or torch cannot do it on them.
    """
    if ranks.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # FSDP calls it
        mistake = (f"--parallel fsdp and --tensor-parallel: torch {torch.__version__} has FSDP for GPUs only; "
                   "a newer torch has it for CPUs")
        raise UsageError(mistake) if ranks.is_main else SystemExit(2)
    mesh, together = build_mesh(config, ranks), config.memory.tensor_parallel
    if together > 1:
        parallelize(model, mesh["tensor"])
    _fully_shard(model, mesh, dtype)
    model.to_empty(device=ranks.device)
    if together > 1:
        mark_fused(model, together)
    with _PartsOfWholeFills():
        model.initialize_weights()
    return model


def build_mesh(config: TrainConfig, ranks: Ranks) -> "dist.DeviceMesh":
    """Processes by role: copies of the model x shards of a copy x devices that compute a shard's blocks together.

    Without fsdp every copy has one shard. Raises UsageError where --shard-size does not divide the devices.
    """
    together, data_ranks = config.memory.tensor_parallel, config.data_ranks(ranks.world_size)
    size = (config.memory.shard_size or data_ranks) if config.memory.parallel == "fsdp" else 1
    if data_ranks % size:
        among = f" in groups of --tensor-parallel {together}" if together > 1 else ""
        mistake = f"--shard-size {size} does not divide the {data_ranks} devices{among}"
        raise UsageError(mistake) if ranks.is_main else SystemExit(2)
    return dist.init_device_mesh(ranks.device.type, (data_ranks // size, size, together),
                                 mesh_dim_names=("copies", "shards", "tensor"))


def _fully_shard(model: nn.Module, mesh: "dist.DeviceMesh", dtype: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh["shards"] if mesh["copies"].size() == 1 else mesh["copies", "shards"]
    in_blocks = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=in_blocks)
    fully_shard(model, mesh=mesh, mp_policy=outside, reshard_after_forward=False)


class _PartsOfWholeFills(TorchFunctionMode):
    """Inside, filling a DTensor makes the whole tensor for a moment and keeps this process's part of it.

    So the random numbers are those a single process draws, however many share the tensor.
    """

    FILLS = frozenset({nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_, Tensor.copy_})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target, *rest = args or (kwargs.get("tensor"),)
        if func not in self.FILLS or target is None or not is_sharded(target):
            return func(*args, **kwargs)
        kwargs.pop("tensor", None)
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(whole, *rest, **kwargs)
        pieces(target, local(target)).copy_from(whole)
        return target
