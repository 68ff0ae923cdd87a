"""Memory that kernels take inside themselves and give back before they return, which no tensor of the step shows.

Each was found by holding the events of real steps against the recorded ones; the rules are those of the kernels'
sources.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from dit.planner.record import Internal

aten = torch.ops.aten
_CASTING = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add_.Tensor, aten.mul_.Tensor}


def internals(device_kind: str) -> Internal:
    """The temporaries of ``device_kind``'s kernels ("cpu" or "cuda"), for :class:`dit.planner.record.Recorder`."""
    rules = _CPU if device_kind == "cpu" else _CUDA

    def taken(func, args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
        rule = rules.get(func)
        return [size for size in rule(args, kwargs, outputs) if size] if rule is not None else []

    return taken


def replacements(device_kind: str) -> dict[object, Callable]:
    """Stand-ins for operations that meta refuses, or whose result there has another layout than on the device."""
    return {aten._fused_sgd_.default: _nothing, aten.convolution.default: _convolution_result,
            aten.native_group_norm.default: partial(_group_norm, device_kind == "cpu"),
            aten._to_copy.default: partial(_to_host, device_kind == "cpu")}


def _nothing(*args: object, **kwargs: object) -> None:
    """aten._fused_sgd_ writes in place and takes no memory."""


def _to_host(is_there: bool, tensor: Tensor, *, device: torch.device | None = None, **kwargs: object) -> Tensor:
    """A device's tensor copied to the host: nothing happens where the device is the host."""
    if device is None or device.type != "cpu" or not tensor.is_meta:
        return NotImplemented
    return tensor.detach() if is_there else torch.empty(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)


def _convolution_result(*args: object, **kwargs: object) -> Tensor:
    """cuDNN and oneDNN give channels last where image or weights have it (native/ConvUtils.h)."""
    result = aten.convolution.default(*args, **kwargs)
    return torch.empty_like(result, memory_format=torch.channels_last) if _wants_last(args[0], args[1]) else result


def _wants_last(image: Tensor, weight: Tensor) -> bool:
    return torch.channels_last in (suggest_memory_format(image), suggest_memory_format(weight))


def _image_copy(image: Tensor, weight: Tensor) -> list[int]:
    layout = torch.channels_last if _wants_last(image, weight) else torch.contiguous_format
    return [] if image.is_contiguous(memory_format=layout) else [_size(image)]


def _group_norm(keeps_layout: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int,
                size: int, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """On a CPU the result keeps a channels-last layout, on a GPU it is contiguous (native/group_norm.cpp)."""
    layout = torch.preserve_format if keeps_layout else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout), x.new_empty(n, groups), x.new_empty(n, groups)


def _copies(*tensors: Tensor) -> list[int]:
    """Copies of those that are not contiguous, which many kernels make first."""
    return [_size(tensor) for tensor in tensors if not tensor.is_contiguous()]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _layer_norm(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    return _copies(args[0])


def _layer_norm_backward(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    return _copies(args[0], args[1])


# ---- CUDA ----

def _flash_backward(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    """The queries' gradient is summed in fp32, padded (flash_attn/flash_api.cpp, mha_bwd)."""
    images, heads, length, head_size = args[1].shape
    padded_length = -(-length // 128) * 128
    padded_head = -(-head_size // 32) * 32 if head_size <= 192 else 256
    return [4 * images * padded_length * heads * padded_head, 4 * images * heads * padded_length]


def _efficient_backward(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    """In fp32 the rows' sums of gradient times output are made by ordinary operations (attention_backward.cu)."""
    images, heads, length, head_size = args[1].shape
    sums = 4 * images * heads * length
    return [_size(args[0]), sums, sums] if args[1].dtype is torch.float32 else [sums]


def _cudnn_convolution(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    """Images are brought into the layout of the weights (cudnn/ConvShared.cpp)."""
    return _image_copy(args[0], args[1])


def _group_norm_copy(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    return _copies(args[0])


def _cudnn_backward(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    return _copies(args[0])


_CUDA = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm_copy,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.convolution.default: _cudnn_convolution,
    aten.convolution_backward.default: _cudnn_backward,
}


# ---- CPU ----

def _casts(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    """On a CPU, operands of another dtype than the result are converted first (TensorIterator.cpp, compute_types)."""
    dtype = torch.result_type(args[0], args[1]) if isinstance(args[1], Tensor) else args[0].dtype
    return [operand.numel() * dtype.itemsize for operand in args[:2]
            if isinstance(operand, Tensor) and operand.dim() and operand.dtype is not dtype]


def _attention_blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and keys one thread works on at once (cpu/FlashAttentionKernel.cpp)."""
    length = query.shape[2]
    return min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, key.shape[2])


def _attention(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    rows, columns = _attention_blocks(args[0], args[1])
    per_thread = 4 * rows * (columns + 2 + args[0].shape[-1])
    reduced = 2 * rows * columns if args[0].dtype is not torch.float32 else 0
    return [torch.get_num_threads() * per_thread, torch.get_num_threads() * reduced]


def _attention_backward(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    rows, columns = _attention_blocks(args[1], args[2])
    reduced = 2 * 2 * rows * columns if args[1].dtype is not torch.float32 else 0
    return [torch.get_num_threads() * 4 * 2 * rows * columns, torch.get_num_threads() * reduced]


def _channel_block() -> int:
    """Channels that oneDNN's blocked layouts keep together, and pad to."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _uses_onednn(tensor: Tensor) -> bool:
    """Convolution.cpp, use_mkldnn: always in fp32; in bf16 and fp16 where the processor has instructions for it."""
    return tensor.dtype is torch.float32 or (
        tensor.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _padded(channels: int) -> int:
    block = _channel_block()
    return -(-channels // block) * block


def _convolution(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    """oneDNN reorders weights and result, unless channels come last anyway; else im2col's columns."""
    image, weight, output = args[0], args[1], outputs[0]
    if not _uses_onednn(image):
        return [image.element_size() * image.shape[0] * weight[0].numel() * math.prod(output.shape[2:])]
    if _wants_last(image, weight):
        return _image_copy(image, weight)
    return [weight.numel() * weight.element_size(), output.numel() * output.element_size()]


def _convolution_backward(args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[int]:
    gradient, image, weight = args[0], args[1], args[2]
    copy = _copies(gradient)
    if not _uses_onednn(image):
        return [*copy, image.element_size() * image.shape[0] * weight[0].numel() * math.prod(gradient.shape[2:])]
    padded = _padded(image.shape[1])
    size = image.element_size()
    return [*copy, gradient.numel() * size, image.numel() // image.shape[1] * padded * size,
            weight.numel() // weight.shape[1] * padded * size]


_CPU = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys(_CASTING, _casts),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
