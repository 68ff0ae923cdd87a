"""Reading latent shards: the same latents as encoding in the loop, wherever a batch begins; what is refused."""
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from extracted import SIZE, damage, save_vae

from dit.codec import build_codec
from dit.config import UsageError
from dit.data import PositionDataset, micro_batches
from dit.images import ImageData, ImageIndex
from dit.latents import LatentData, read_manifest


@pytest.fixture(scope="module")
def readable(images, tmp_path_factory):
    """The images without the broken one, which the shards leave out."""
    folder = Path(shutil.copytree(images, tmp_path_factory.mktemp("readable") / "images"))
    (folder / "class 1" / "3.png").unlink()
    return folder


def test_latents_equal_encoding_in_the_loop(latents, readable, vae):
    """The same positions give the same latents, flips and posterior samples, up to the shards' half precision."""
    source = ImageData(ImageIndex(readable), SIZE)
    pixels = PositionDataset(source, seed=3, noise_shape=(4, 8, 12), needs_posterior_noise=True)
    stored = PositionDataset(LatentData(latents), seed=3, noise_shape=(4, 8, 12))
    a, b = pixels.__getitems__(range(40)), stored.__getitems__(range(40))
    codec = build_codec(vae)
    encoded = codec.encode(a["x"], a["posterior_noise"])
    torch.testing.assert_close(b["x"], encoded, rtol=2e-3, atol=2e-3)
    assert (b["x"] - encoded).abs().mean() < 2e-4
    for name in ("y", "t", "drop", "noise"):
        assert torch.equal(a[name], b[name]), name
    assert "posterior_noise" not in b
    wrong = codec.encode(a["x"].flip(-1), a["posterior_noise"])  # the comparison can see a flip
    assert (b["x"] - wrong).abs().mean() > 1e-2


def test_training_loss_is_the_same_from_latents_and_from_pixels(latents, readable, vae):
    from dit.diffusion import create_diffusion
    from dit.model import DiT
    torch.manual_seed(1)
    model = DiT(input_size=(8, 12), patch_size=2, in_channels=4, hidden_size=32, depth=2, num_heads=2, num_classes=3)
    for parameter in model.parameters():  # the official start gives zero whatever the input
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    losses = []
    codec = build_codec(vae)
    for data in (ImageData(ImageIndex(readable), SIZE), LatentData(latents)):
        pixels = not data.holds_moments
        dataset = PositionDataset(data, seed=0, noise_shape=(4, 8, 12), needs_posterior_noise=pixels)
        batch = dataset.__getitems__(range(64))
        x = codec.encode(batch["x"], batch["posterior_noise"]) if pixels else batch["x"]
        conditions = {"y": batch["y"], "force_drop_ids": batch["drop"]}
        with torch.no_grad():
            loss = create_diffusion().training_losses(model, x, batch["t"], conditions, noise=batch["noise"])["loss"]
        losses.append(loss.mean().item())
    assert losses[0] > 0.1 and abs(losses[0] - losses[1]) / losses[0] < 1e-4


def test_reading_is_bitwise_independent_of_grouping(latents):
    dataset = PositionDataset(LatentData(latents), seed=0, noise_shape=(4, 8, 12))
    many = dataset.__getitems__(range(31))["x"]
    assert torch.equal(many, torch.cat([dataset.__getitems__([i])["x"] for i in range(31)]))
    loader = micro_batches(dataset, start_step=0, global_batch=31, num_workers=1)
    assert torch.equal(many, next(loader)["x"])
    loader.close()


def test_flip_and_posterior_differ_between_epochs(latents):
    """Nothing random is frozen in the shards: one image gives other latents whenever it comes again."""
    dataset = PositionDataset(LatentData(latents), seed=0, noise_shape=(4, 8, 12))
    positions = np.arange(23 * 8)
    chosen = positions[dataset.order(positions) == 5]
    assert len(chosen) == 8
    batch = dataset.__getitems__(chosen)["x"]
    assert len(torch.unique(batch.flatten(1), dim=0)) == 8


def test_statistics_describe_the_latents(latents):
    manifest, data = read_manifest(latents), LatentData(latents)
    dataset = PositionDataset(data, seed=0, noise_shape=(4, 8, 12))
    x = dataset.__getitems__(range(23 * 40))["x"]
    torch.testing.assert_close(x.std(), torch.tensor(manifest["latent_std_overall"]), rtol=0.02, atol=0)
    torch.testing.assert_close(x.std(dim=(0, 2, 3)), torch.tensor(manifest["latent_std"]), rtol=0.02, atol=0)
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.tensor(manifest["latent_mean"]), rtol=0, atol=0.02)


def test_std_far_from_one_is_warned_about(copy, caplog):
    manifest = json.loads((copy / "manifest.json").read_text())
    for std, warned in ((1.0, 0), (0.2, 1)):
        caplog.clear()
        (copy / "manifest.json").write_text(json.dumps(manifest | {"latent_std_overall": std}))
        LatentData(copy)
        assert caplog.text.count(f"standard deviation is {std:.3f}") == warned


@pytest.mark.parametrize(("request_", "message"), [
    ({"image_hw": (32, 32)}, "--image-size 32x32: the latents in .* were made at 16x24"),
    ({"num_classes": 1000}, "--num-classes 1000: the latents in .* have 3 classes; give --num-classes 3"),
    ({"num_classes": 2}, "--num-classes 2: the latents in .* have 3 classes"),
])
def test_latents_of_another_kind(latents, request_, message):
    with pytest.raises(UsageError, match=message) as caught:
        LatentData(latents, **request_)
    assert "\n" not in str(caught.value)
    LatentData(latents, SIZE, num_classes=0)


def test_a_model_shaped_for_other_latents(latents):
    with pytest.raises(UsageError, match=r"shaped for latents of \(16, 8, 12\), the data has \(4, 8, 12\)"):
        PositionDataset(LatentData(latents), seed=0, noise_shape=(16, 8, 12))


def test_latents_of_another_vae(latents, vae, tmp_path):
    shutil.copytree(vae, tmp_path / "elsewhere")
    LatentData(latents, vae=str(tmp_path / "elsewhere"))
    save_vae(tmp_path / "other", seed=9)
    with pytest.raises(UsageError, match="--vae .*other: the latents in .* were made with"):
        LatentData(latents, vae=str(tmp_path / "other"))


@pytest.mark.parametrize(("kind", "message"), [
    ("missing", "shard-00001.safetensors is missing"), ("shortened", "shard-00001.safetensors has .* are right"),
    ("altered", "shard-00001.safetensors has been altered"), ("not a shard", "shard-00001.safetensors is no shard"),
    ("other size", "shard-00000.safetensors holds moments of shape"),
    ("no manifest", r"the extraction is not finished \(3 shards\)"), ("bad manifest", "cannot be read as JSON"),
    ("other format", "is of format 'x'"), ("half a manifest", "manifest.json has no vae; delete it and run"),
])
def test_damaged_folders_are_named(copy, kind, message):
    damage(copy, kind)
    with pytest.raises(UsageError, match=f"--data-path .*{message}") as caught:
        LatentData(copy)
    assert "\n" not in str(caught.value)


def test_folders_without_latents(tmp_path, images):
    with pytest.raises(UsageError, match="not a folder"):
        LatentData(tmp_path / "missing")
    with pytest.raises(UsageError, match="for images it is --data folder"):
        LatentData(images)


def test_memory_does_not_grow_with_what_was_read(latents):
    """Twenty thousand reads; a memory map would keep the shards' pages resident, a list of what was read would too."""
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    dataset = PositionDataset(LatentData(latents), seed=0, noise_shape=(4, 8, 12))
    for start in range(0, 4096, 64):
        dataset.__getitems__(range(start, start + 64))
    before = resident()
    for start in range(4096, 24_576, 64):
        dataset.__getitems__(range(start, start + 64))
    assert resident() - before < 4 << 20


def test_few_files_stay_open(latents, monkeypatch):
    monkeypatch.setattr("dit.open_files.MAX_OPEN", 1)
    data = LatentData(latents)
    before = len(os.listdir("/proc/self/fd"))
    for index in (0, 22, 11, 0, 22):
        moments, _ = data.read_moments(np.array([index]), np.array([False]))
        assert np.isfinite(moments).all()
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_a_run_takes_shape_and_vae_from_its_latents(latents, vae, tmp_path, capsys):
    """Two steps, a sample grid in between, and images from the checkpoint file, without a word about the VAE."""
    import train
    from dit.pipeline import load_pipeline
    flags = ["--data", "latents", "--data-path", str(latents), "--image-size", "16", "24", "--num-classes", "3",
             "--model", "custom", "--depth", "1", "--hidden-size", "16", "--num-heads", "2", "--patch-size", "4",
             "--global-batch-size", "4", "--num-workers", "0", "--max-steps", "2", "--sample-every", "1",
             "--run-dir", str(tmp_path / "run"), "--plan", "off"]
    assert train.main(flags) == 0
    assert (tmp_path / "run" / "samples" / "0000001.png").is_file()
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == ["class 0", "class 1", "class 2"]
    pipeline = load_pipeline(tmp_path / "run" / "checkpoints" / "0000002.pt", torch.device("cpu"))
    assert pipeline.codec.spec.name == vae and pipeline.codec.spec.scale == (0.5,)
    images = next(iter(pipeline.draw([0], [0], cfg_scale=1.0, num_steps=2))).images
    assert images.shape == (1, 3, *SIZE)
