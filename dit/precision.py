"""What fp32, TF32, bf16 and fp16 mean here: autocast of the model's forward, loss scaling, what a device can do."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dit.config import TrainConfig, UsageError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """How one run computes.

    Weights, gradients, moments and the loss are always fp32; ``dtype`` is what autocast uses inside the model (None: no
    autocast). ``scaler`` is disabled, and so does nothing, unless ``dtype`` is fp16.
    """

    device_type: str
    dtype: torch.dtype | None
    tf32: bool
    scaler: torch.amp.GradScaler

    def autocast(self) -> AbstractContextManager:
        """The region in which the model's forward runs."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None)

    @property
    def name(self) -> str:
        """fp32, tf32, bf16 or fp16: what the matrix products run in."""
        if self.dtype is not None:
            return next(name for name, dtype in _DTYPES.items() if dtype is self.dtype)
        return "tf32" if self.tf32 else "fp32"


def resolve(config: TrainConfig, device: torch.device) -> Precision:
    """Decide the precision of a run on ``device`` and set torch's global switches for TF32 and attention kernels.

    Raises UsageError where the device cannot do what was asked for.
    """
    dtype = None
    if config.precision.amp:
        dtype = _DTYPES[choose_amp_dtype(config.precision.amp_dtype, supports_bf16(device), str(device))]
    tf32 = config.precision.tf32 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    _choose_attention(config.precision.attention, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    return Precision(device.type, dtype, tf32, scaler)


def choose_amp_dtype(asked: str, has_bf16: bool, device_name: str) -> str:
    """"bf16" or "fp16" for ``--amp-dtype`` on a device with or without bf16. Raises UsageError for bf16 without."""
    if asked == "bf16" and not has_bf16:
        raise UsageError(f"--amp-dtype bf16: {device_name} has no bf16; use --amp-dtype fp16 (or auto)")
    if asked == "auto":
        return "bf16" if has_bf16 else "fp16"
    return asked


def supports_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself (emulation does not count)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    return True


def _choose_attention(asked: str, device: torch.device) -> None:
    """Leave only the asked attention kernel switched on; globally, so that it also holds where backward recomputes."""
    if device.type != "cuda" and asked in ("efficient", "cudnn"):
        raise UsageError(f"--attention {asked} needs a GPU; {device} has auto, flash and math")
    kernels = torch.backends.cuda
    for name, switch in (("flash", kernels.enable_flash_sdp), ("efficient", kernels.enable_mem_efficient_sdp),
                         ("cudnn", kernels.enable_cudnn_sdp)):
        switch(asked in ("auto", name))
    kernels.enable_math_sdp(asked in ("auto", "math") or device.type != "cuda")
