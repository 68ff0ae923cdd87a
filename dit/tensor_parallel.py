"""Blocks computed by several devices together (``--tensor-parallel K``): each has a share of the heads and of the MLP.

The first Linear of a pair (query, key and value; fc1) has its rows shared out, the second (proj, fc2) its columns, so
that a pair needs one sum over the devices, forward and backward (Shoeybi et al., arXiv 1909.08053). The modulation's
Linear, a third of a block's weights, has its rows shared out and its small output gathered. What lies outside of the
blocks is held and computed by every device alike; where a device's kernels are not deterministic (the label embedding's
backward on a GPU) those copies may come to differ in the last bits, until the run is next taken up from a file.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dit.config import UsageError


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share out the blocks of a model over the devices of a one-dimensional mesh, in place.

    Query, key and value are one Linear, whose rows stand for (query key value, head, channel). A device needs all
    three of its heads, so its rows are not one piece: in the shared-out tensor they are in the order (device, query
    key value, head, channel). ``mark_fused`` says so to what reads and writes the official order.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        if not hasattr(block.attn, "attn_dim"):
            raise UsageError("--tensor-parallel needs a newer timm, whose Attention has attn_dim; pip install -U timm")
        parallelize_module(block, mesh, {
            "attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel(),
            "adaLN_modulation.1": ColwiseParallel(output_layouts=Replicate())})
        block.attn.num_heads //= mesh.size()
        block.attn.attn_dim //= mesh.size()


def mark_fused(model: nn.Module, num_devices: int) -> None:
    """Mark the parameters whose rows ``parallelize`` has put into another order, see ``local_shards.pieces``."""
    for block in model.blocks:
        for parameter in block.attn.qkv.parameters():
            parameter.fused_groups = num_devices
