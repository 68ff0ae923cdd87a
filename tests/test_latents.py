"""Latent shards: the same bytes however they were made, the same latents as encoding in the loop, what is refused."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from dit.codec import build_codec
from dit.config import UsageError
from dit.data import PositionDataset, micro_batches
from dit.extraction import Extraction, extract, finish, prepare
from dit.images import ImageData, ImageIndex
from dit.latents import LatentData, latents_spec, read_manifest, verify_shards

TINY = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "scaling_factor": 0.5,
        "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
SIZE = (16, 24)
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "extract_latents.py"


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vae")
    AutoencoderKL(**TINY).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def latents(images, vae, tmp_path_factory):
    job = extraction(images, vae, tmp_path_factory.mktemp("out") / "latents")
    extract(job, prepare(job))
    finish(job)
    return job.output


@pytest.fixture
def copy(latents, tmp_path):
    return Path(shutil.copytree(latents, tmp_path / "copy"))


def command_line(flags):
    """scripts/extract_latents.py in this process."""
    spec = importlib.util.spec_from_file_location("extract_latents", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(flags)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_manifest(latents, images):
    manifest = read_manifest(latents)
    assert manifest["num_images"] == 23 and manifest["num_unreadable"] == 1
    assert manifest["unreadable"][0]["path"] == "class 1/3.png" and manifest["unreadable"][0]["reason"]
    assert manifest["class_names"] == ["class 0", "class 1", "class 2"] and manifest["images_per_class"] == [9, 7, 7]
    assert manifest["latent_shape"] == [4, 8, 12] and manifest["image_size"] == [16, 24]
    assert [shard["count"] for shard in manifest["shards"]] == [10, 9, 4]
    assert verify_shards(latents, manifest) and str(images) not in json.dumps(manifest)
    assert latents_spec(latents).scale == (0.5,)


def test_shards_are_plain_safetensors(latents):
    from safetensors.numpy import load_file
    tensors = load_file(latents / "shard-00001.safetensors")
    assert tensors["moments"].shape == (9, 2, 8, 8, 12) and tensors["moments"].dtype == np.float16
    assert tensors["labels"].tolist() == [1] * 6 + [2] * 3
    assert tensors["index"].tolist() == [10, 11, 13, 14, 15, 16, 17, 18, 19]  # 12 is the broken one


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


@pytest.mark.parametrize("killed", ["after a shard", "in a shard", "before the description", "before the manifest"])
def test_resumed_extraction_has_the_same_bytes(latents, images, vae, tmp_path, killed):
    output = tmp_path / "again"
    job = extraction(images, vae, output)
    pending = prepare(job)
    extract(job, pending[:3 if killed == "before the manifest" else 1])
    if killed == "in a shard":  # a temporary file of a process that is no more, and half a shard under its name
        (output / "shard-00001.safetensors").write_bytes((latents / "shard-00001.safetensors").read_bytes()[:500])
    elif killed == "before the description":
        (output / "shard-00000.json").unlink()
    job = extraction(images, vae, output)
    extract(job, prepare(job))
    finish(job)
    assert contents(output) == contents(latents)


def test_a_killed_process_is_resumed_by_the_same_command(latents, images, vae, tmp_path, monkeypatch, capsys):
    """SIGKILL after the first shard, then two ranks as torchrun has them: the bytes of one undisturbed process."""
    output = tmp_path / "out"
    flags = ["--data-path", str(images), "--vae", vae, "--image-size", "16", "24", "--output", str(output),
             "--batch-size", "4", "--shard-images", "10", "--num-workers", "1"]
    process = subprocess.Popen([sys.executable, str(SCRIPT), *flags], stderr=subprocess.DEVNULL)
    while not (output / "shard-00000.json").exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):  # the last to finish sums up; rank 0 would wait for the others
        monkeypatch.setenv("RANK", rank)
        command_line(flags)
    said = capsys.readouterr().err
    assert "23 images in 3 shards, 1 unreadable" in said and "class 1/3.png" in said
    left_behind = {name for name in contents(output) if name.startswith(".")}
    made = {name: data for name, data in contents(output).items() if name not in left_behind}
    assert sorted(made) == sorted(contents(latents))
    assert [name for name, data in contents(latents).items() if made[name] != data] == []


@pytest.mark.parametrize(("change", "message"), [
    ({"image_hw": (16, 16)}, r"another image size \(\[16, 24\] before, \[16, 16\] now\)"),
    ({"batch_size": 8}, "another batch size"), ({"augment": "resize"}, "another augment"),
])
def test_another_extraction_does_not_go_into_the_same_folder(copy, images, vae, change, message):
    with pytest.raises(UsageError, match=message) as caught:
        prepare(extraction(images, vae, copy, **change))
    assert "\n" not in str(caught.value)


def test_an_output_that_is_no_folder_of_ours(images, vae, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--output .*cannot be written"):
        prepare(extraction(images, vae, tmp_path / "file"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "shard-00000.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match="holds shards but no extraction.json"):
        prepare(extraction(images, vae, tmp_path / "foreign"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))
    with pytest.raises(UsageError, match=r"0.00 GiB are needed and 0.00 GiB are free"):
        prepare(extraction(images, vae, tmp_path / "new"))


def test_a_full_disk_leaves_no_half_file(images, vae, tmp_path, monkeypatch):
    job = extraction(images, vae, tmp_path / "out")
    pending = prepare(job)

    def full(descriptor):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="shard-00000.safetensors cannot be written .No space left"):
            extract(job, pending)
    assert list(contents(job.output)) == ["extraction.json"] and prepare(job) == pending


def test_no_readable_image(vae, tmp_path):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "0.png").write_bytes(b"")
    job = extraction(tmp_path / "images", vae, tmp_path / "out")
    extract(job, prepare(job))
    with pytest.raises(UsageError, match="none of its 1 images can be read"):
        finish(job)


def test_shard_size_keeps_the_number_of_files_readable(images, vae, tmp_path):
    job = extraction(images, vae, tmp_path, shard_images=0)
    assert job.images_per_shard == 512 and job.num_shards == 1

    class Many:
        def __len__(self):
            return 14_197_122
    job = Extraction(Many(), job.codec, tmp_path, SIZE, "center-crop", 4)
    assert job.num_shards <= 512


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
    torch.manual_seed(9)
    AutoencoderKL(**TINY).save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match="--vae .*other: the latents in .* were made with"):
        LatentData(latents, vae=str(tmp_path / "other"))


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


@pytest.mark.parametrize(("kind", "message"), [
    ("missing", "shard-00001.safetensors is missing"), ("shortened", "shard-00001.safetensors has .* are right"),
    ("altered", "shard-00001.safetensors has been altered"), ("not a shard", "shard-00001.safetensors is no shard"),
    ("other size", "shard-00000.safetensors holds moments of shape"),
    ("no manifest", r"the extraction is not finished \(3 shards\)"), ("bad manifest", "cannot be read as JSON"),
    ("other format", "is of format 'x'"),
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


def test_a_deleted_shard_is_made_again(copy, latents, images, vae):
    damage(copy, "missing")
    job = extraction(images, vae, copy)
    assert prepare(job) == [1]
    extract(job, [1])
    finish(job)
    assert contents(copy) == contents(latents)


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


@pytest.mark.parametrize(("flags", "message"), [
    ([], "--data-path is needed"), (["--data-path", "x"], "--output is needed"),
    (["--data-path", "x", "--output", "y"], "--data-path x: not a folder"),
    (["--image-size", "0"], "--image-size"), (["--batch-size", "-3"], "--batch-size"), (["--nonsense"], "--nonsense"),
    (["--data-path", "x", "--output", "y", "--image-size", "1", "2", "3"], "--image-size 1 2 3: one number"),
])
def test_mistakes_on_the_command_line_are_usage_errors(flags, message):
    with pytest.raises(UsageError, match=message):
        command_line(flags)


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
