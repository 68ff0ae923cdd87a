"""What a device would run, on the meta device, which has neither autocast nor fused attention of its own.

:class:`Emulation` is the region of a forward: inside it functions are cast as the device's autocast would cast them,
with its cache of cast weights, and attention runs the kernel that the device would choose.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Names of functions by what autocast does to them (aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP and
# AT_FORALL_FP32, and the lists of autocast_mode.cpp for the CPU). What is in neither list runs in its inputs' widest
# type.
_LOWER_BOTH = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d",
               "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
               "scaled_dot_product_attention"}
LOWER_PRECISION = {"cuda": _LOWER_BOTH | {"addmv", "addr", "mv", "chain_matmul", "multi_dot", "einsum", "prelu"},
                   "cpu": _LOWER_BOTH | {"vecdot", "einsum"}}
_FP32_BOTH = {"mse_loss", "nll_loss", "prod", "cdist", "cosine_embedding_loss", "hinge_embedding_loss",
              "margin_ranking_loss", "multilabel_margin_loss", "triplet_margin_loss", "soft_margin_loss"}
FLOAT32 = {
    "cuda": _FP32_BOTH | {
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "__pow__", "__rpow__", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm",
        "rms_norm", "renorm", "logsumexp", "cosine_similarity", "poisson_nll_loss", "l1_loss", "smooth_l1_loss",
        "huber_loss", "kl_div", "dist", "pdist", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "norm"},
    "cpu": _FP32_BOTH | {"binary_cross_entropy", "grid_sampler", "polar", "quantile", "nanquantile", "stft", "trace",
                         "ctc_loss", "multi_margin_loss", "smooth_l1_loss", "huber_loss", "inverse", "pinverse"},
}

ATTENTION = {  # kernel -> the operation that scaled_dot_product_attention runs, and its arguments beyond q, k, v
    "flash": (torch.ops.aten._scaled_dot_product_flash_attention, {}),
    "efficient": (torch.ops.aten._scaled_dot_product_efficient_attention, {"attn_bias": None}),
    "cudnn": (torch.ops.aten._scaled_dot_product_cudnn_attention, {"attn_bias": None}),
    "flash_cpu": (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, {}),
    "math": (torch.ops.aten._scaled_dot_product_attention_math, {}),
}


class Emulation(TorchFunctionMode):
    """One region of the device's autocast (none if ``dtype`` is None) and its attention kernels.

    ``attention`` gives the kernel for a (q, k, v). ``on_cast`` hears of every weight that enters the cache. Entering it
    anew is a new region with an empty cache, as leaving the outermost autocast is on a device.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None, attention: Callable[[Tensor], str],
                 on_cast: Callable[[Tensor], None] = lambda tensor: None):
        super().__init__()
        self.dtype, self._attention, self._on_cast = dtype, attention, on_cast
        self._lower, self._float32 = LOWER_PRECISION[device_type], FLOAT32[device_type]
        self._cache: dict[int, Tensor] = {}

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._cache.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.dtype is not None:
            if name in self._lower:
                args, kwargs = self._all(self._to_lower, args), self._all(self._to_lower, kwargs)
            elif name in self._float32:
                args, kwargs = self._all(_to_float32, args), self._all(_to_float32, kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _all(self, cast: Callable[[Tensor], Tensor], value: object) -> object:
        if isinstance(value, Tensor):
            return cast(value)
        if isinstance(value, tuple | list):
            return type(value)(self._all(cast, item) for item in value)
        if isinstance(value, dict):
            return {key: self._all(cast, item) for key, item in value.items()}
        return value

    def _to_lower(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (self.dtype, torch.float64):
            return tensor
        cacheable = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not cacheable:
            return tensor.to(self.dtype)
        key = id(tensor)
        if key not in self._cache:
            self._cache[key] = tensor.to(self.dtype)
            self._on_cast(self._cache[key])
        return self._cache[key]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                dropout_p: float = 0.0,
                is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        assert attn_mask is None and not dropout_p and not enable_gqa, "the planner knows plain attention only"
        operation, extra = ATTENTION[self._attention(query)]
        if "attn_bias" in extra:
            needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            extra = {**extra, "compute_log_sumexp": needs_grad}
        result = operation(query, key, value, **extra, is_causal=is_causal, scale=scale)
        return result[0]


def _to_float32(tensor: Tensor) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.float() if eligible else tensor


class MetaScaler:
    """``torch.amp.GradScaler``'s tensor operations, on a device it refuses. Does nothing unless ``enabled``."""

    def __init__(self, enabled: bool, device: torch.device):
        self.enabled = enabled
        if enabled:
            self._scale = torch.full((), 65536.0, device=device)
            self._growth_tracker = torch.full((), 0, dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.enabled:
            inverse = self._scale.double().reciprocal().float()
            self._found_inf = torch.full((), 0.0, device=inverse.device)
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, self._found_inf, inverse)

    def update(self) -> None:
        if self.enabled:
            torch._amp_update_scale_(self._scale, self._growth_tracker, self._found_inf, 2.0, 0.5, 2000)
            del self._found_inf


class MetaPrecision:
    """Stands in for ``dit.precision.Precision`` where the device is emulated."""

    def __init__(self, emulation: Callable[[], Emulation], scaler: MetaScaler):
        self._emulation, self.scaler = emulation, scaler

    def autocast(self) -> AbstractContextManager:
        return self._emulation()
