"""The codec: shapes, scale and shift, chunks, where a VAE is looked for, and what is said when it is not there."""
import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from dit import codec as codec_module
from dit.codec import SD_VAE_CONFIG, Codec, build_codec, codec_spec, spec_from_config
from dit.config import UsageError

TINY = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": [8, 16], "norm_num_groups": 4,
        "layers_per_block": 1, "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2}


def tiny(**changes):
    torch.manual_seed(0)
    spec = spec_from_config("tiny", {**TINY, **changes})
    return build_codec(spec, random_weights=True)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    AutoencoderKL(**TINY).save_pretrained(tmp_path / "vae é")
    return tmp_path / "vae é"


def test_identity():
    codec = build_codec("none")
    x = torch.rand(2, 3, 8, 8)
    assert codec.spec.latent_shape((8, 12)) == (3, 8, 12)
    assert codec.encode(x, torch.zeros(2, 3, 8, 8)) is x and torch.equal(codec.decode(x), x)
    assert torch.equal(codec.decode(x * 4), (x * 4).clamp(-1, 1))


def test_official_spec_without_network_or_weights():
    for name in ("ema", "mse"):
        spec = codec_spec(name)
        assert (spec.latent_channels, spec.factor, spec.scale, spec.shift) == (4, 8, (0.18215,), (0.0,))
        assert spec.latent_shape((256, 512)) == (4, 32, 64)
    with torch.device("meta"):
        vae = AutoencoderKL(**SD_VAE_CONFIG)
    assert sum(parameter.numel() for parameter in vae.parameters()) == 83_653_863  # the published size of SD's VAE


def test_encode_equals_diffusers_posterior():
    codec = tiny(scaling_factor=0.7, shift_factor=0.3)
    x, noise = torch.rand(3, 3, 16, 24) * 2 - 1, torch.randn(3, 4, 8, 12)
    posterior = codec.vae.encode(x).latent_dist
    expected = (posterior.mean + posterior.std * noise - 0.3) * 0.7
    torch.testing.assert_close(codec.encode(x, noise), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(codec.encode(x), (posterior.mode() - 0.3) * 0.7, rtol=1e-5, atol=1e-6)
    decoded = codec.vae.decode(expected / 0.7 + 0.3).sample.clamp(-1, 1)
    torch.testing.assert_close(codec.decode(expected), decoded, rtol=1e-5, atol=1e-5)


def test_per_channel_mean_and_std():
    mean, std = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    codec = tiny(latents_mean=mean, latents_std=std, scaling_factor=0.5)
    moments = torch.randn(2, 8, 4, 4)
    expected = (moments[:, :4] - torch.tensor(mean).view(4, 1, 1)) * 0.5 / torch.tensor(std).view(4, 1, 1)
    torch.testing.assert_close(codec.spec.latents(moments), expected)
    np.testing.assert_allclose(codec.spec.latents(moments.numpy()), expected.numpy(), rtol=1e-6)
    with pytest.raises(UsageError, match="4 latent channels need 4"):
        spec_from_config("x", {**TINY, "latents_mean": [0.0], "latents_std": [1.0]})


def test_extreme_log_variance_is_clamped_as_in_diffusers():
    logvar = torch.tensor([-1e4, 1e4])
    expected = 2 * torch.exp(0.5 * torch.tensor([-30.0, 20.0]))
    spec = spec_from_config("x", {**TINY, "latent_channels": 2, "scaling_factor": 2.0})
    moments = torch.cat([torch.zeros(2), logvar]).view(1, 4, 1, 1)
    assert torch.equal(spec.latents(moments, torch.ones(1, 2, 1, 1)).flatten(), expected)
    as_array = spec.latents(moments.numpy(), np.ones((1, 2, 1, 1), np.float32))
    assert as_array.dtype == np.float32
    np.testing.assert_allclose(as_array.ravel(), expected.numpy(), rtol=1e-6)


def test_chunks_change_nothing():
    codec = tiny()
    x, noise = torch.rand(5, 3, 16, 16), torch.randn(5, 4, 8, 8)
    chunked = Codec(codec.spec, codec.vae, chunk=2)
    torch.testing.assert_close(chunked.encode(x, noise), codec.encode(x, noise), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(chunked.decode(noise), codec.decode(noise), rtol=1e-5, atol=1e-6)
    sizes = []
    codec.vae.encoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    chunked.encode(x)
    assert sizes == [2, 2, 1]


def test_frozen_eval_channels_last_and_outside_autocast():
    codec = tiny()
    assert not codec.vae.training and not any(parameter.requires_grad for parameter in codec.vae.parameters())
    seen = []

    def look(module, args, output):
        seen.append((output.dtype, args[0].is_contiguous(memory_format=torch.channels_last)))
    codec.vae.encoder.conv_in.register_forward_hook(look)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        latents = codec.encode(torch.rand(2, 3, 16, 16, requires_grad=True))
    assert seen == [(torch.float32, True)]
    assert latents.dtype == torch.float32 and not latents.requires_grad and latents.is_contiguous()


def test_bf16_runs_in_bf16_and_returns_fp32():
    codec = build_codec(spec_from_config("tiny", TINY), random_weights=True, dtype=torch.bfloat16)
    assert next(codec.vae.parameters()).dtype == torch.bfloat16
    assert codec.encode(torch.rand(2, 3, 16, 16)).dtype == codec.decode(torch.rand(2, 4, 8, 8)).dtype == torch.float32


def test_meta_device_for_planning():
    codec = build_codec("ema", device="meta", random_weights=True, chunk=2)
    latents = codec.encode(torch.empty(4, 3, 64, 64, device="meta"), torch.empty(4, 4, 8, 8, device="meta"))
    assert latents.shape == (4, 4, 8, 8) and latents.is_meta
    assert codec.decode(latents).shape == (4, 3, 64, 64)


@pytest.mark.parametrize(("channels", "blocks", "factor"), [(4, 2, 2), (16, 4, 8), (32, 5, 16), (8, 6, 32)])
def test_other_latent_sizes_come_from_the_config(tmp_path, channels, blocks, factor):
    config = {**TINY, "_class_name": "AutoencoderKL", "latent_channels": channels, "block_out_channels": [8] * blocks,
              "down_block_types": ["DownEncoderBlock2D"] * blocks, "up_block_types": ["UpDecoderBlock2D"] * blocks}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = codec_spec(str(tmp_path))
    assert (spec.latent_channels, spec.factor) == (channels, factor)
    codec = build_codec(spec, random_weights=True)
    assert codec.encode(torch.rand(1, 3, 64, 96)).shape[1:] == spec.latent_shape((64, 96))
    with pytest.raises(UsageError, match=f"--image-size 33x64: each side must be a multiple of {factor}"):
        spec.latent_shape((33, 64))


def test_local_folder_pipeline_folder_and_single_file(folder, tmp_path, caplog):
    x = torch.rand(2, 3, 16, 16)
    codec = build_codec(str(folder), with_hash=True)
    expected = codec.encode(x)
    torch.manual_seed(0)
    original = AutoencoderKL(**TINY).encode(x).latent_dist.mode() * 0.18215  # not channels-last: other summation order
    torch.testing.assert_close(original, expected, rtol=1e-5, atol=1e-6)
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "vae").symlink_to(folder)
    assert torch.equal(build_codec(str(pipeline)).encode(x), expected)
    assert torch.equal(build_codec(str(folder / "diffusion_pytorch_model.safetensors")).encode(x), expected)
    alone = tmp_path / "alone" / "vae.safetensors"
    alone.parent.mkdir()
    alone.write_bytes((folder / "diffusion_pytorch_model.safetensors").read_bytes())
    single = build_codec(str(alone), with_hash=True)
    assert "no config.json beside it; taking the scale 0.18215" in caplog.text
    assert single.sha256 == codec.sha256 and len(codec.sha256) == 64
    torch.testing.assert_close(single.vae.encoder.conv_in.weight, codec.vae.encoder.conv_in.weight)


def test_files_from_before_diffusers_018_load(folder):
    from safetensors.torch import load_file, save_file
    path = folder / "diffusion_pytorch_model.safetensors"
    old = {}
    for name, tensor in load_file(path).items():
        if ".attentions." in name:
            for new, former in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
                name = name.replace(f".{new}.", f".{former}.")
        old[name] = tensor
    expected = build_codec(str(folder), with_hash=True).sha256
    save_file(old, path)
    assert any(".query." in name for name in old) and build_codec(str(folder), with_hash=True).sha256 == expected


def test_the_hash_names_the_weights(folder):
    torch.manual_seed(1)
    other = AutoencoderKL(**TINY)
    assert codec_module.weights_sha256(other) != build_codec(str(folder), with_hash=True).sha256


def break_folder(folder, kind):
    weights = folder / "diffusion_pytorch_model.safetensors"
    if kind == "no weights":
        weights.unlink()
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif kind == "bad json":
        (folder / "config.json").write_text("{")
    else:
        config = json.loads((folder / "config.json").read_text())
        config.update({"other shape": {"block_out_channels": [8, 24]},
                       "other class": {"_class_name": "AutoencoderDC"}}[kind])
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("kind", "message"), [
    ("no weights", "no weights in .*diffusion_pytorch_model.safetensors"), ("no config", "no config.json in"),
    ("truncated", "does not hold the weights"), ("bad json", "cannot be read as JSON"),
    ("other shape", "does not hold the weights"), ("other class", "of class AutoencoderDC; AutoencoderKL is supported"),
])
def test_broken_folders(folder, kind, message):
    break_folder(folder, kind)
    with pytest.raises(UsageError, match=f"--vae .*{message}") as caught:
        build_codec(str(folder))
    assert "\n" not in str(caught.value)


def test_single_files_that_say_too_little(tmp_path):
    from safetensors.torch import save_file
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="no AutoencoderKL with"):
        codec_spec(str(tmp_path / "a.safetensors"))
    save_file({"decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)}, tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="do not have diffusers' names"):
        codec_spec(str(tmp_path / "b.safetensors"))
    AutoencoderKL(**{**TINY, "latent_channels": 16}).save_pretrained(tmp_path / "v")
    (tmp_path / "v" / "config.json").unlink()
    with pytest.raises(UsageError, match="16 latent channels and no scaling factor; put the VAE's config.json beside"):
        codec_spec(str(tmp_path / "v" / "diffusion_pytorch_model.safetensors"))
    (tmp_path / "c.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="no readable .safetensors file"):
        codec_spec(str(tmp_path / "c.safetensors"))


def test_without_network_one_line_says_which_files_to_put_where(monkeypatch, tmp_path):
    monkeypatch.setattr(codec_module, "_hub_is_reachable", lambda: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def absent(*args, **kw):
        assert kw == {"local_files_only": True}
        raise OSError("not cached\nsecond line")
    monkeypatch.setattr(AutoencoderKL, "from_pretrained", absent)
    monkeypatch.setattr(AutoencoderKL, "load_config", absent)
    for call in (lambda: build_codec("mse"), lambda: codec_spec("some/vae")):
        with pytest.raises(UsageError, match="config.json and diffusion_pytorch_model.safetensors into a f") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="--vae ./x: no such file or folder"):
        codec_spec("./x")
