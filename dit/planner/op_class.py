"""What kind of work an operation is, and the numbers its time depends on. Needs no torch.

A traced operation and a timed one go through the same function here, so that what was measured for one kind of work is
used for the same kind of work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dit.planner.trace import Op

CLASSES = ("gemm", "batched gemm", "attention forward", "attention backward", "convolution", "norm", "elementwise",
           "reduction", "copy", "indexing", "optimizer", "ema", "view")

_OF_NAME = {
    "mm": "gemm", "addmm": "gemm", "bmm": "batched gemm", "baddbmm": "batched gemm",
    "convolution": "convolution", "convolution_backward": "convolution",
    "native_layer_norm": "norm", "native_layer_norm_backward": "norm", "native_group_norm": "norm",
    "native_group_norm_backward": "norm", "_softmax": "norm", "_softmax_backward_data": "norm",
    "_safe_softmax": "norm", "sum": "reduction", "mean": "reduction", "linalg_vector_norm": "reduction",
    "clone": "copy", "copy_": "copy", "_to_copy": "copy", "cat": "copy", "stack": "copy",
    "slice_backward": "copy", "select_backward": "copy", "constant_pad_nd": "copy", "embedding": "indexing",
    "index": "indexing", "gather": "indexing", "embedding_dense_backward": "indexing", "index_put": "indexing",
    "index_put_": "indexing",
}


@dataclass(frozen=True)
class Work:
    """An operation's kind of work and size.

    ``key`` says which measurements apply (kernel, layout, dtype), ``cls`` is one of CLASSES. ``size`` is (m, n, k) or
    (b, m, n, k) of a matrix product, (heads x images, tokens, head size) of fused attention, (FLOPs,) of a
    convolution, (tensors, bytes) of a multi-tensor operation, otherwise (bytes,).
    """

    key: str
    cls: str
    size: tuple[float, ...]
    flops: int
    bytes: int


def works(ops: Sequence[Op]) -> list[Work]:
    """The work of each operation, in order. The order matters: a product's layout shows in the view made for it."""
    return [work_of(op, before) for before, op in zip([None, *ops], ops, strict=False)]


def work_of(op: Op, before: Op | None) -> Work:
    """The work of ``op``, which ran after ``before``."""
    name = op.name.split(".", 1)[-1]
    num_bytes = op.bytes_read + op.bytes_written
    cls = _class(op, name)
    size: tuple[float, ...] = (max(1.0, float(num_bytes)),)
    kernel, flops = name.rstrip("_"), op.flops  # in place or not, the work is the same
    if cls == "gemm":
        size, kernel = _gemm_size(op), f"gemm {_layout(op, name, before)}"
    elif cls == "batched gemm":
        (batch, m, k), (_, _, n) = op.inputs[-2:]
        size = (batch, m, n, k)
    elif cls.startswith("attention"):
        size = _attention_size(op, name)
        flops = flops or attention_flops(size, backward=cls.endswith("backward"))
    elif cls == "convolution":
        size, kernel = (max(1.0, float(op.flops)),), f"{name} {'patches' if _is_patch_embedding(op) else 'general'}"
    elif name.startswith(("_foreach", "_fused")):
        size = (float(op.num_tensors), max(1.0, float(num_bytes)))
    return Work(f"{kernel} {op.dtype}", cls, size, flops, num_bytes)


def _class(op: Op, name: str) -> str:
    if op.kind == "view":
        return "view"
    if "scaled_dot_product" in name:
        return "attention backward" if name.endswith("backward") else "attention forward"
    if name.startswith(("_foreach", "_fused")):
        return "ema" if op.phase == "ema" else "optimizer"
    return _OF_NAME.get(name, "elementwise")


def _gemm_size(op: Op) -> tuple[float, float, float]:
    (m, k), (_, n) = op.inputs[-2:]
    return float(m), float(n), float(k)


def _layout(op: Op, name: str, before: Op | None) -> str:
    """Which operand is transposed: "nt" a linear layer's forward, "nn" its input's and "tn" its weight's gradient."""
    if name == "addmm":
        return "nt"
    left, right = op.inputs[-2:]
    was_turned = before is not None and before.name == "aten.t" and before.outputs
    if was_turned and before.outputs[0] == left and before.outputs[0] != right:
        return "tn"
    return "nn" if op.phase == "backward" else "nt"


def _attention_size(op: Op, name: str) -> tuple[float, float, float]:
    shape = op.inputs[1] if name.endswith("backward") else op.inputs[0]  # a backward's first input is the gradient
    batch, heads, tokens, head_size = shape
    return float(batch * heads), float(tokens), float(head_size)


def attention_flops(size: tuple[float, ...], backward: bool) -> int:
    """Operations of fused attention: two T x T products, five in the backward, which computes the scores again."""
    rows, tokens, head_size = size
    return int((10 if backward else 4) * rows * tokens**2 * head_size)


def _is_patch_embedding(op: Op) -> bool:
    """Whether kernels do not overlap, as in a patch embedding: a product in disguise."""
    image, weight = (op.inputs[0], op.inputs[1]) if op.name.endswith("convolution") else (op.inputs[1], op.inputs[2])
    grid = op.outputs[0] if op.name.endswith("convolution") else op.inputs[0]
    return weight[-1] > 1 and grid[-1] * weight[-1] == image[-1]
