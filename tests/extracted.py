"""Tiny images, a tiny VAE and the latents it makes of them, for the tests of extraction and of reading."""
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dit.codec import build_codec
from dit.extraction import Extraction, extract, finish, prepare
from dit.images import ImageIndex

TINY = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "scaling_factor": 0.5,
        "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
SIZE = (16, 24)
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "extract_latents.py"


def save_vae(path, seed):
    """A small AutoencoderKL with random weights, as diffusers saves one."""
    from diffusers import AutoencoderKL
    torch.manual_seed(seed)
    AutoencoderKL(**TINY).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def vae(tmp_path_factory):
    return str(save_vae(tmp_path_factory.mktemp("vae"), seed=0))


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Three classes, 23 images, one of them broken, in a folder with a difficult name."""
    root = tmp_path_factory.mktemp("bilder é 漢")
    random = np.random.default_rng(0)
    for label in range(3):
        (root / f"class {label}").mkdir()
        for i in range(9 - label):
            low = random.integers(0, 256, (4, 6, 3), dtype=np.uint8)
            Image.fromarray(low).resize((30, 20), Image.BICUBIC).save(root / f"class {label}" / f"{i}.png")
    (root / "class 1" / "3.png").write_bytes(b"broken")
    return root


def extraction(images, vae, output, **changes):
    settings = dict(image_hw=SIZE, augment="center-crop", batch_size=4, shard_images=10) | changes
    return Extraction(ImageIndex(images), build_codec(vae, with_hash=True), Path(output), **settings)


@pytest.fixture(scope="session")
def latents(images, vae, tmp_path_factory):
    job = extraction(images, vae, tmp_path_factory.mktemp("out") / "latents")
    extract(job, prepare(job))
    finish(job)
    return job.output


@pytest.fixture
def copy(latents, tmp_path):
    """The latents, to be altered."""
    return Path(shutil.copytree(latents, tmp_path / "copy"))


def command_line(flags):
    """scripts/extract_latents.py in this process."""
    spec = importlib.util.spec_from_file_location("extract_latents", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(flags)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def damage(copy, kind):
    shard = copy / "shard-00001.safetensors"
    data = shard.read_bytes()
    if kind == "missing":
        shard.unlink()
    elif kind == "shortened":
        shard.write_bytes(data[:-1])
    elif kind == "altered":
        shard.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif kind == "not a shard":
        shard.write_bytes(bytes(len(data)))
    elif kind == "other size":
        manifest = json.loads((copy / "manifest.json").read_text()) | {"latent_shape": [4, 12, 8]}
        (copy / "manifest.json").write_text(json.dumps(manifest))
    elif kind == "no manifest":
        (copy / "manifest.json").unlink()
    elif kind == "bad manifest":
        (copy / "manifest.json").write_text("{")
    elif kind == "other format":
        (copy / "manifest.json").write_text('{"format": "x"}')
    elif kind == "half a manifest":
        (copy / "manifest.json").write_text('{"format": "dit-latents-1"}')
