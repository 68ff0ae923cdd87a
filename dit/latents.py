"""Latent shards: the VAE's moments of every image and of its mirror image, read by position.

A folder has a `manifest.json` and safetensors shards. A shard holds consecutive images of the sorted image folder:
`moments` (n, 2, 2C, h, w) float16 (mean, then log-variance; plain, then mirrored), `labels` (n,) int64 and `index` (n,)
int64, the image's number in the folder. Nothing random is stored: flip, posterior sample and label drop happen at read
time.

Reads are `pread` of one image's moments rather than a memory map: about as fast from the page cache, one request
instead of a page fault per 4 KiB from a disk, and a worker's resident memory does not grow by what it has read.
"""
from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dit.codec import CodecSpec, spec_from_config
from dit.config import UsageError
from dit.open_files import OpenFiles

logger = logging.getLogger(__name__)

FORMAT = "dit-latents-1"
MANIFEST = "manifest.json"
VERIFY_BYTES = 1 << 30  # checksummed at every start: about a second
STD_RANGE = (0.75, 1.33)  # of the latents; the diffusion's noise schedule presumes 1
_NEEDED = ("vae", "image_size", "latent_shape", "shards", "latent_std_overall")


def read_manifest(root: str | Path) -> dict[str, Any]:
    """The manifest of a folder of latents. Raises UsageError where there is none, or an unfinished extraction."""
    path = Path(root) / MANIFEST
    if not Path(root).is_dir():
        raise UsageError(f"--data-path {root}: not a folder; scripts/extract_latents.py makes one of latents")
    if not path.is_file():
        parts = len(list(Path(root).glob("shard-*.json")))
        state = f"the extraction is not finished ({parts} shards); run the same command again" if parts else \
            "scripts/extract_latents.py makes a folder of latents; for images it is --data folder"
        raise UsageError(f"--data-path {root}: no {MANIFEST}; {state}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--data-path {root}: {MANIFEST} cannot be read as JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise UsageError(f"--data-path {root}: {MANIFEST} is of format {found!r}; {FORMAT!r} is read")
    missing = [name for name in _NEEDED if not manifest.get(name)]
    if missing:
        raise UsageError(f"--data-path {root}: {MANIFEST} has no {missing[0]}; delete it and run "
                         "scripts/extract_latents.py again")
    return manifest


def latents_spec(root: str | Path) -> CodecSpec:
    """The spec of the VAE that made the latents in ``root``. Raises UsageError as `read_manifest`."""
    vae = read_manifest(root)["vae"]
    return spec_from_config(vae["name"], vae["config"])


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_places(path: str | Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """{name: (dtype, shape, byte offset in the file)} from a safetensors header. Raises ValueError if it is none."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < 1 << 20:
            raise ValueError("no safetensors header")
        header = json.loads(file.read(length))
    return {name: (entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items() if name != "__metadata__"}


class LatentData:
    """Source of latents (C, h, w) over a folder of shards; see the module's docstring and `dit.data`.

    Raises UsageError for latents of another image size, VAE or number of classes than asked for (None: whatever they
    have), and for a missing, shortened or altered shard, which it names. Checksums of more than `VERIFY_BYTES` are left
    to ``scripts/extract_latents.py --verify``; sizes and headers are always checked.
    """

    holds_moments = True

    def __init__(self, root: str | Path, image_hw: tuple[int, int] | None = None, *, vae: str | None = None,
                 num_classes: int | None = None):
        self.root = Path(root)
        manifest = self.manifest = read_manifest(root)
        self.spec = spec_from_config(manifest["vae"]["name"], manifest["vae"]["config"])
        self.class_names: list[str] = manifest.get("class_names", [])
        self.num_classes = len(self.class_names)
        self._check_request(image_hw, vae, num_classes)
        self.sample_shape = tuple(manifest["latent_shape"])
        self._files = [shard["file"] for shard in manifest["shards"]]
        self._ends = np.cumsum([shard["count"] for shard in manifest["shards"]], dtype=np.int64)
        self.num_samples = int(self._ends[-1])
        self._offsets = np.array([self._check_shard(shard) for shard in manifest["shards"]], dtype=np.int64)
        self._moments_shape = (2 * self.sample_shape[0], *self.sample_shape[1:])
        self._moments_bytes = 2 * int(np.prod(self._moments_shape))
        self._open = OpenFiles([self.root / name for name in self._files], f"--data-path {root}")
        verify_shards(self.root, manifest, VERIFY_BYTES)
        low, high = STD_RANGE
        if not low < manifest["latent_std_overall"] < high:
            logger.warning("--data-path %s: the latents' standard deviation is %.3f; the noise schedule presumes "
                           "about 1. Is the VAE's scaling_factor right for these images?", root,
                           manifest["latent_std_overall"])

    def read(self, indices: np.ndarray, scalars, posterior_noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latents (N, C, h, w) float32, labels (N,) int64; mirrored where ``scalars.flips``, sampled with the noise."""
        moments, labels = self.read_moments(indices, scalars.flips)
        moments = torch.from_numpy(moments).float().numpy()  # numpy's own conversion from half is 20 times slower
        return self.spec.latents(moments, posterior_noise), labels

    def read_moments(self, indices: np.ndarray, flips: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moments (N, 2C, h, w) float16 as stored, labels (N,) int64."""
        indices = np.asarray(indices, dtype=np.int64)
        shards = np.searchsorted(self._ends, indices, side="right")
        rows = indices - np.where(shards > 0, self._ends[shards - 1], 0)
        moments = np.empty((len(indices), *self._moments_shape), dtype=np.float16)
        labels = np.empty(len(indices), dtype=np.int64)
        places = self._offsets[shards]  # (N, 2): of moments and labels
        starts = places[:, 0] + (2 * rows + flips) * self._moments_bytes
        label_starts = places[:, 1] + 8 * rows
        for i, shard in enumerate(shards.tolist()):
            self._open.read_into(shard, int(starts[i]), moments[i])
            self._open.read_into(shard, int(label_starts[i]), labels[i:i + 1])
        return moments, labels

    def _check_request(self, image_hw, vae, num_classes) -> None:
        made = self.manifest["image_size"]
        if image_hw is not None and list(image_hw) != made:
            raise UsageError(f"--image-size {image_hw[0]}x{image_hw[1]}: the latents in {self.root} were made at "
                             f"{made[0]}x{made[1]}")
        if vae is not None and vae != self.spec.name and not self._same_vae(vae):
            raise UsageError(f"--vae {vae}: the latents in {self.root} were made with {self.spec.name}; leave --vae "
                             "out, or extract again")
        if num_classes and num_classes != self.num_classes:
            advice = f"give --num-classes {self.num_classes}" + (", or 0 for none" if self.num_classes else "")
            raise UsageError(f"--num-classes {num_classes}: the latents in {self.root} have {self.num_classes} "
                             f"classes; {advice}")

    def _same_vae(self, vae: str) -> bool:
        """Whether a path given now holds the weights that made the latents: one VAE may lie in many places."""
        from dit.codec import HUB_NAMES, build_codec
        if {vae, self.spec.name} <= set(HUB_NAMES):
            return False
        return build_codec(vae, with_hash=True).sha256 == self.manifest["vae"]["sha256"]

    def _check_shard(self, shard: dict[str, Any]) -> tuple[int, int]:
        """Offsets of moments and labels, after checking size and header."""
        path = self.root / shard["file"]
        where = f"--data-path {self.root}: {shard['file']}"
        if not path.is_file():
            raise UsageError(f"{where} is missing; run scripts/extract_latents.py again to make it")
        if path.stat().st_size != shard["bytes"]:
            raise UsageError(f"{where} has {path.stat().st_size} bytes, {shard['bytes']} are right; delete it and run "
                             "scripts/extract_latents.py again")
        channels, *hw = self.sample_shape
        count = shard["count"]
        try:
            places = tensor_places(path)
            found = places["moments"][:2], places["labels"][:2]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where} is no shard of latents ({error})") from error
        if found != (("F16", (count, 2, 2 * channels, *hw)), ("I64", (count,))):
            raise UsageError(f"{where} holds moments of shape {found[0][1]}, the manifest says "
                             f"{(count, 2, 2 * channels, *hw)}")
        return places["moments"][2], places["labels"][2]


def verify_shards(root: Path, manifest: dict[str, Any], budget_bytes: float = float("inf")) -> bool:
    """Compare shards with their checksums until the budget is used up; True if all were compared.

    Raises UsageError that names the first altered shard.
    """
    for shard in manifest["shards"]:
        budget_bytes -= shard["bytes"]
        if budget_bytes < 0:
            return False
        if file_sha256(root / shard["file"]) != shard["sha256"]:
            raise UsageError(f"--data-path {root}: {shard['file']} has been altered (its checksum is another than in "
                             f"{MANIFEST}); delete it and run scripts/extract_latents.py again")
    return True
