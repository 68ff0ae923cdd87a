"""Pixels <-> moments <-> latents. The only module that knows a VAE, its scale or its shift.

Moments are the posterior's mean and log-variance as the VAE gives them, (N, 2C, h, w); latents are what the diffusion
model sees: (sample - shift) * scale, about unit variance, (N, C, h, w). In pixel space both are the pixels.
"""
from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dit.config import UsageError

logger = logging.getLogger(__name__)

HUB_NAMES = {"ema": "stabilityai/sd-vae-ft-ema", "mse": "stabilityai/sd-vae-ft-mse"}
WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")

# config.json of the two official VAEs (they differ in their weights only), so that planning needs neither network nor
# weights.
SD_VAE_CONFIG: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 2, "norm_num_groups": 32,
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": 256, "scaling_factor": 0.18215,
}
_RENAMED = ((".query.", ".to_q."), (".key.", ".to_k."), (".value.", ".to_v."), (".proj_attn.", ".to_out.0."))
LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers clamps it


@dataclass(frozen=True)
class CodecSpec:
    """What a codec does to shapes and values, known without its weights. ``vae_config`` is None in pixel space."""

    name: str
    latent_channels: int
    factor: int
    """Image pixels per latent pixel, along each side."""
    scale: tuple[float, ...] = (1.0,)
    """Per latent channel, or one for all."""
    shift: tuple[float, ...] = (0.0,)
    vae_config: Mapping[str, Any] | None = field(default=None, compare=False)
    """Constructor arguments of diffusers' AutoencoderKL."""

    def latent_shape(self, image_hw: tuple[int, int]) -> tuple[int, int, int]:
        """(C, h, w) of an image of (H, W). Raises UsageError if the factor does not divide the size."""
        if any(side % self.factor for side in image_hw):
            raise UsageError(f"--image-size {image_hw[0]}x{image_hw[1]}: each side must be a multiple of "
                             f"{self.factor}, the factor of --vae {self.name}")
        return self.latent_channels, image_hw[0] // self.factor, image_hw[1] // self.factor

    def latents(self, moments, posterior_noise=None):
        """Moments (N, 2C, h, w) -> latents (N, C, h, w), of tensors or arrays; the mean without ``posterior_noise``."""
        mean, logvar = moments[:, :self.latent_channels], moments[:, self.latent_channels:]
        if posterior_noise is None:
            z = mean
        else:
            exp = np.exp if isinstance(moments, np.ndarray) else torch.exp
            z = mean + exp(0.5 * logvar.clip(*LOGVAR_RANGE)) * posterior_noise
        return (z - self.per_channel(self.shift, z)) * self.per_channel(self.scale, z)

    def per_channel(self, values: tuple[float, ...], like):
        """``scale`` or ``shift`` as something that broadcasts over ``like``."""
        if len(values) == 1:
            return values[0]
        if isinstance(like, np.ndarray):
            return np.array(values, dtype=like.dtype).reshape(-1, 1, 1)
        return like.new_tensor(values).view(-1, 1, 1)


def codec_spec(vae: str, image_channels: int = 3) -> CodecSpec:
    """Spec of ``none`` (pixel space), ``ema``, ``mse``, a local folder or file, or a hub name, without reading weights.

    Raises UsageError where nothing of this name can be found.
    """
    if vae == "none":
        return CodecSpec("none", image_channels, 1)
    return spec_from_config(vae, _vae_config(vae))


def spec_from_config(name: str, config: Mapping[str, Any]) -> CodecSpec:
    """Spec of an AutoencoderKL from its config.json.

    Scale and shift follow diffusers' pipelines: latents = (z - shift_factor) * scaling_factor, and where the file has
    latents_mean and latents_std, (z - mean) * scaling_factor / std.
    """
    kind = config.get("_class_name", "AutoencoderKL")
    if kind != "AutoencoderKL":
        raise UsageError(f"--vae {name}: its config.json is of class {kind}; AutoencoderKL is supported")
    channels = config.get("latent_channels", 4)
    scale = config.get("scaling_factor", SD_VAE_CONFIG["scaling_factor"])
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        scales, shifts = tuple(scale / float(value) for value in std), tuple(float(value) for value in mean)
        if len(scales) != channels or len(shifts) != channels:
            raise UsageError(f"--vae {name}: latents_mean and latents_std have {len(shifts)} and {len(scales)} values; "
                             f"{channels} latent channels need {channels}")
    else:
        scales, shifts = (float(scale),), (float(config.get("shift_factor") or 0.0),)
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    return CodecSpec(name, channels, 2 ** (len(config.get("block_out_channels", (64,))) - 1), scales, shifts, arguments)


class Codec:
    """Encoder and decoder of one spec. ``vae`` is the AutoencoderKL, None for the identity.

    Runs in the VAE's own dtype outside autocast, without gradients, at most ``chunk`` images at once (0: all).
    """

    def __init__(self, spec: CodecSpec, vae: nn.Module | None = None, chunk: int = 0, sha256: str | None = None):
        self.spec, self.vae, self.chunk, self.sha256 = spec, vae, chunk, sha256

    @torch.no_grad()
    def encode_moments(self, x: Tensor) -> Tensor:
        """Pixels (N, 3, H, W) in [-1, 1] -> moments (N, 2C, h, w) float32: mean, then log-variance."""
        assert self.vae is not None, "pixel space has no moments"
        moments = [self._moments(part) for part in self._parts(x)]
        return moments[0] if len(moments) == 1 else torch.cat(moments)

    @torch.no_grad()
    def encode(self, x: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Pixels (N, 3, H, W) in [-1, 1] -> latents (N, C, h, w) float32; the posterior's mean without
        ``posterior_noise``.
        """
        if self.vae is None:
            return x
        return self.spec.latents(self.encode_moments(x), posterior_noise)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (N, C, h, w) -> pixels (N, 3, H, W) float32, clamped to [-1, 1]."""
        if self.vae is None:
            return latents.float().clamp(-1, 1)
        latents = latents.float()
        z = latents / self.spec.per_channel(self.spec.scale, latents) + self.spec.per_channel(self.spec.shift, latents)
        with self._no_autocast(z):
            pixels = [self.vae.decode(self._as_input(part), return_dict=False)[0].float() for part in self._parts(z)]
        return torch.cat(pixels).clamp(-1, 1)

    def _moments(self, x: Tensor) -> Tensor:
        with self._no_autocast(x):
            posterior = self.vae.encode(self._as_input(x), return_dict=False)[0]
        return posterior.parameters.float().contiguous()

    def _as_input(self, x: Tensor) -> Tensor:
        return x.to(dtype=next(self.vae.parameters()).dtype, memory_format=torch.channels_last)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.chunk) if self.chunk else (x,)

    @staticmethod
    def _no_autocast(x: Tensor):
        return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def build_codec(vae: str | CodecSpec, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
                chunk: int = 0, compiled: bool = False, random_weights: bool = False,
                with_hash: bool = False) -> Codec:
    """The codec on ``device`` in ``dtype`` (bf16 or fp32; the official VAEs overflow in fp16), channels-last and
    frozen.

    ``random_weights`` skips loading, for planning (device "meta") and tests; ``with_hash`` sets ``sha256`` of the fp32
    weights. Raises UsageError, in one line, where the VAE cannot be found or its weights do not fit.
    """
    spec = codec_spec(vae) if isinstance(vae, str) else vae
    if spec.vae_config is None:
        return Codec(spec)
    if random_weights:
        with torch.device(device):
            module = _autoencoder_class()(**spec.vae_config)
    else:
        module = _load_vae(spec)
    sha256 = weights_sha256(module) if with_hash else None
    # nn.Module's own `to`: diffusers' warns about dtypes whatever the model is
    module = nn.Module.to(module, device=device, dtype=dtype, memory_format=torch.channels_last)
    module.eval().requires_grad_(False)
    if compiled:
        module.encoder, module.decoder = torch.compile(module.encoder), torch.compile(module.decoder)
    return Codec(spec, module, chunk, sha256)


def _autoencoder_class() -> type[nn.Module]:
    """diffusers' AutoencoderKL.

    On its way diffusers imports scipy and torchao where they are installed: two seconds, for schedulers' and
    quantizers' sake, which no autoencoder has. So meanwhile they count as not installed.
    """
    from diffusers.utils import import_utils

    known = {name: getattr(import_utils, name) for name in ("_scipy_available", "_torchao_available")
             if hasattr(import_utils, name)}
    try:
        for name in known:
            setattr(import_utils, name, False)
        from diffusers import AutoencoderKL
    finally:
        for name, value in known.items():
            setattr(import_utils, name, value)
    return AutoencoderKL


def weights_sha256(module: nn.Module) -> str:
    """Hash of the names, shapes and values of a module's state, in fp32, so that the file format does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _vae_config(vae: str) -> Mapping[str, Any]:
    if vae in HUB_NAMES:
        return SD_VAE_CONFIG
    path = Path(vae)
    if path.is_dir():
        return _read_config(vae, _vae_folder(path) / "config.json")
    if path.is_file():
        return _single_file_config(vae, path)
    if vae.count("/") != 1 or vae.startswith((".", "/", "~")):
        raise UsageError(f"--vae {vae}: no such file or folder; give ema, mse, none, a folder with config.json and "
                         f"{WEIGHT_FILES[0]}, or a .safetensors file")
    return _from_hub(vae, vae, _autoencoder_class().load_config)


def _vae_folder(path: Path) -> Path:
    """A VAE's folder, also where a whole pipeline's is given."""
    return path / "vae" if (path / "vae" / "config.json").is_file() else path


def _read_config(vae: str, path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--vae {vae}: no config.json in {path.parent}; a diffusers AutoencoderKL has it and "
                         f"{WEIGHT_FILES[0]}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--vae {vae}: {path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise UsageError(f"--vae {vae}: {path} is not a model's config.json")
    return config


def _single_file_config(vae: str, path: Path) -> Mapping[str, Any]:
    """Config of one weights file: config.json beside it, else what its tensors' shapes say."""
    for beside in (path.with_suffix(".json"), path.parent / "config.json"):
        if beside.is_file():
            return _read_config(vae, beside)
    shapes = _safetensors_shapes(vae, path)
    advice = f"put the VAE's config.json beside {path.name}"
    if "decoder.conv_in.weight" not in shapes:
        raise UsageError(f"--vae {vae}: has no tensor decoder.conv_in.weight, so it is no AutoencoderKL with "
                         "diffusers' names")
    if "encoder.down_blocks.0.resnets.0.conv1.weight" not in shapes:
        raise UsageError(f"--vae {vae}: its tensors do not have diffusers' names; convert it with "
                         "AutoencoderKL.from_single_file(...).save_pretrained(...)")
    channels = shapes["decoder.conv_in.weight"][1]
    if channels != 4:
        raise UsageError(f"--vae {vae}: {channels} latent channels and no scaling factor; {advice}")
    logger.warning("--vae %s: no config.json beside it; taking the scale %s of the official VAEs", vae,
                   SD_VAE_CONFIG["scaling_factor"])
    widths = []
    while (key := f"encoder.down_blocks.{len(widths)}.resnets.0.conv1.weight") in shapes:
        widths.append(shapes[key][0])
    layers = sum(f"encoder.down_blocks.0.resnets.{index}.conv1.weight" in shapes for index in range(100))
    return {**SD_VAE_CONFIG, "latent_channels": channels, "block_out_channels": widths, "layers_per_block": layers,
            "down_block_types": ["DownEncoderBlock2D"] * len(widths),
            "up_block_types": ["UpDecoderBlock2D"] * len(widths),
            "norm_num_groups": math.gcd(32, *widths), "use_quant_conv": "quant_conv.weight" in shapes,
            "use_post_quant_conv": "post_quant_conv.weight" in shapes,
            "mid_block_add_attention": any(key.startswith("encoder.mid_block.attentions") for key in shapes)}


def _safetensors_shapes(vae: str, path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"--vae {vae}: is no readable .safetensors file ({str(error).splitlines()[0]})") from error


def _load_vae(spec: CodecSpec) -> nn.Module:
    path = Path(spec.name)
    if path.is_dir() or path.is_file():
        return _load_local(spec, path)
    return _from_hub(spec.name, HUB_NAMES.get(spec.name, spec.name), _autoencoder_class().from_pretrained)


def _load_local(spec: CodecSpec, path: Path) -> nn.Module:
    if path.is_dir():
        folder = _vae_folder(path)
        path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
        if path is None:
            raise UsageError(f"--vae {spec.name}: no weights in {folder}; expected {WEIGHT_FILES[0]}")
    try:
        module = _autoencoder_class()(**spec.vae_config)
        if path.suffix == ".bin":
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file
            state = load_file(path)
        module.load_state_dict(_current_names(state))
    except Exception as error:  # a truncated file, other shapes, other names, an impossible config
        raise UsageError(f"--vae {spec.name}: {path} does not hold the weights its config describes "
                         f"({' '.join(str(error).split())[:200]})") from error
    return module


def _current_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Attention weights of files written before diffusers 0.18 under today's names, as the official VAEs' files
    need.
    """
    renamed = {}
    for name, tensor in state.items():
        if ".attentions." in name:
            for old, new in _RENAMED:
                name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _from_hub(vae: str, hub_name: str, load: Callable[..., Any]) -> Any:
    """From the hub client's cache, else from the network; the client would retry for half a minute without one."""
    for options in ({"local_files_only": True}, {}):
        if not options and not _hub_is_reachable():
            break
        try:
            return load(hub_name, **options)
        except Exception as error:  # the client raises a dozen kinds, all meaning that it is not there
            logger.debug("%s: %s", hub_name, error)
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    raise UsageError(f"--vae {vae}: {hub_name} is neither in {cache} nor reachable; put its config.json and "
                     f"{WEIGHT_FILES[0]} into a folder and give --vae FOLDER")


def _hub_is_reachable() -> bool:
    """Whether a connection opens; assumed behind a proxy, which alone knows."""
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if urllib.request.getproxies().get(url.scheme):
        return True
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=5).close()
        return True
    except OSError:
        return False
