"""Extraction: the same bytes however often it was killed and however many made them, and what it refuses."""
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from extracted import SCRIPT, SIZE, command_line, contents, damage, extraction

from dit.config import UsageError
from dit.extraction import Extraction, extract, finish, prepare
from dit.images import ImageIndex
from dit.latents import latents_spec, read_manifest, verify_shards


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


@pytest.mark.parametrize("killed", ["after a shard", "in a shard", "before the description", "before the manifest"])
def test_resumed_extraction_has_the_same_bytes(latents, images, vae, tmp_path, killed):
    output = tmp_path / "again"
    job = extraction(images, vae, output)
    pending = prepare(job)
    extract(job, pending[:3 if killed == "before the manifest" else 1])
    if killed == "in a shard":  # a temporary file of a process that is no more, and half a shard under its name
        (output / "shard-00001.safetensors").write_bytes((latents / "shard-00001.safetensors").read_bytes()[:500])
        (output / ".shard-00001.safetensors.4711").write_bytes(b"half")
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
    for content in ("{", "{}", '{"vae": 1}'):
        (tmp_path / "foreign" / "extraction.json").write_text(content)
        with pytest.raises(UsageError, match="--output .*extraction.json cannot be read .*; give a new or empty"):
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


def test_a_deleted_shard_is_made_again(copy, latents, images, vae):
    damage(copy, "missing")
    job = extraction(images, vae, copy)
    assert prepare(job) == [1]
    extract(job, [1])
    finish(job)
    assert contents(copy) == contents(latents)


@pytest.mark.parametrize(("flags", "message"), [
    ([], "--data-path is needed"), (["--data-path", "x"], "--output is needed"),
    (["--data-path", "x", "--output", "y"], "--data-path x: not a folder"),
    (["--image-size", "0"], "--image-size"), (["--batch-size", "-3"], "--batch-size"), (["--nonsense"], "--nonsense"),
    (["--data-path", "x", "--output", "y", "--image-size", "1", "2", "3"], "--image-size 1 2 3: one number"),
])
def test_mistakes_on_the_command_line_are_usage_errors(flags, message):
    with pytest.raises(UsageError, match=message):
        command_line(flags)


@pytest.mark.parametrize(("flags", "message"), [
    (["--num-classes", "1000"], "--num-classes 1000: .* has 3 classes; leave it out, or give 0"),
    (["--image-size", "17"], "--image-size 17x17: each side must be a multiple of 2, the factor of --vae"),
    (["--vae", "none"], "--vae none: pixel space has no latents"),
    (["--vae", "EMPTY"], "--vae .*: no config.json in"),
    (["--classes-file", "EMPTY"], "--classes-file .* cannot be read"),
    (["--device", "cuda"], "--device cuda: PyTorch sees no GPU here"),
])
def test_flags_that_do_not_fit_the_images_or_the_machine(flags, message, images, vae, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = [str(tmp_path) if flag == "EMPTY" else flag for flag in flags]
    with pytest.raises(UsageError, match=message) as caught:
        command_line(["--data-path", str(images), "--vae", vae, "--output", str(tmp_path / "out"), *flags])
    assert "\n" not in str(caught.value) and not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("folder", ["", "class 1"])
def test_a_folder_that_cannot_be_read_is_named(images, folder, monkeypatch):
    """Its images would silently be missing, and the labels after it still be right."""
    scandir = os.scandir

    def refused(path="."):
        if os.path.realpath(path) == os.path.realpath(images / folder):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UsageError, match=rf"--data-path .*{folder}: cannot be read \(Permission denied\)"):
        ImageIndex(images)


def test_an_empty_class_is_refused(vae, tmp_path):
    (tmp_path / "images" / "empty").mkdir(parents=True)
    with pytest.raises(UsageError, match="class folder 'empty' holds no images .*; remove it, or list the wanted"):
        extraction(tmp_path / "images", vae, tmp_path / "out")
