from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from reference import GOLDEN, TIMESTEPS, cosine_input, fill_weights, relative_error

from dit.config import UsageError
from dit.diffusion import create_diffusion
from dit.model import DiT, DiT_models
from dit.sampling import (
    SampleBatch,
    check_request,
    forward_with_cfg,
    generate,
    save_grid,
    save_images,
    seed_noise,
    to_uint8,
    with_guidance,
)

TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=3, num_heads=4, num_classes=10)
LATENTS = (4, 8, 8)
CLASSES, SEEDS = [3, 1, 4, 1, 5, 9, 2, 6], [11, 12, 13, 14, 2**64 - 1, 0, 17, 18]


def tiny(**changes) -> DiT:
    return fill_weights(DiT(**{**TINY, **changes})).eval()


def elementwise(x, t, y):
    """A network in which no image can touch another, not even through the order of a sum."""
    t, y = (1e-4 * t).view(-1, 1, 1, 1), (0.05 * y).view(-1, 1, 1, 1)
    return torch.cat([0.9 * x + t + y, 0.2 * x - y], dim=1)


def to_rgb(latents):
    return latents[:, :3] / 4


def sample(model, classes=CLASSES, seeds=SEEDS, decode=to_rgb, **options):
    options = {"latent_shape": LATENTS, "null_class": 10, "cfg_scale": 2.0, "num_steps": 5, **options}
    batches = list(generate(model, create_diffusion(), decode, classes, seeds, **options))
    return batches, torch.cat([batch.images for batch in batches])


# ---- guidance ----

@pytest.mark.parametrize("case", ["tiny", "S8"])
@torch.no_grad()
def test_guidance_on_three_channels_equals_the_official_models(case):
    model = tiny() if case == "tiny" else fill_weights(DiT_models["DiT-S/8"]()).eval()
    null, size = model.num_classes, model.input_size[0]
    x, t, y = cosine_input((4, 4, size, size)), torch.tensor(TIMESTEPS), torch.tensor([0, 1, null, null])
    output = forward_with_cfg(model, x, t, y, 4.0, cfg_channels=3)
    if case == "S8":
        output = output.flatten()[:: output.numel() // 256]
    assert relative_error(output, np.load(GOLDEN)[f"{case}/cfg_out"]) < 1e-5


def test_guidance_follows_its_formula_on_all_channels_by_default():
    x, t, y = cosine_input((3, *LATENTS)), torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    conditional, unconditional = elementwise(x, t, y), elementwise(x, t, torch.full_like(y, 10))
    guided = unconditional + 3.0 * (conditional - unconditional)
    for cfg_channels, count in ((None, 4), (3, 3), (1, 1)):
        output = with_guidance(elementwise, 3.0, 10, cfg_channels)(x, t, y)
        expected = torch.cat([guided[:, :count], conditional[:, count:]], dim=1)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(("cfg_scale", "images"), [(1.0, 2), (2.0, 4), (0.0, 4)])
def test_scale_one_sends_every_image_through_once(cfg_scale, images):
    seen = []
    sample(lambda x, t, y: seen.append(len(x)) or elementwise(x, t, y), CLASSES[:2], SEEDS[:2], cfg_scale=cfg_scale)
    assert seen == [images] * 5


def test_half_precision_outputs_are_guided_in_float32():
    x, t, y = cosine_input((2, *LATENTS)), torch.tensor([5, 6]), torch.tensor([1, 2])
    output = with_guidance(lambda *args: elementwise(*args).bfloat16(), 4.0, 10)(x, t, y)
    expected = with_guidance(lambda *args: elementwise(*args).bfloat16().float(), 4.0, 10)(x, t, y)
    assert output.dtype == torch.float32 and torch.equal(output, expected)


# ---- seeds ----

@pytest.mark.parametrize(("sampler", "eta"), [("ddpm", 0.0), ("ddim", 0.0), ("ddim", 0.7)])
def test_a_seed_names_an_image_whatever_the_batch(sampler, eta):
    by_batch = [sample(elementwise, batch_size=size, sampler=sampler, eta=eta)[1] for size in (1, 3, 8)]
    assert by_batch[0].float().std() > 10
    assert torch.equal(by_batch[0], by_batch[1]) and torch.equal(by_batch[0], by_batch[2])
    order = [6, 2, 7, 0, 1, 5, 4, 3]
    moved = sample(elementwise, [CLASSES[i] for i in order], [SEEDS[i] for i in order], sampler=sampler, eta=eta)[1]
    assert torch.equal(moved, by_batch[0][order])


def test_a_seed_names_an_image_of_a_real_model_too():
    """A matrix product may sum in another order for another batch: at most the last of 256 levels differs."""
    by_batch = [sample(tiny(), batch_size=size)[1].int() for size in (1, 3, 8)]
    assert by_batch[0].float().std() > 10
    for other in by_batch[1:]:
        assert (by_batch[0] - other).abs().max() <= 1


def test_seed_and_class_make_the_image():
    _, images = sample(elementwise, [1, 1, 2, 1], [7, 8, 7, 7])
    assert torch.equal(images[0], images[3])
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])


def test_noise_is_fresh_at_every_step_and_standard_normal():
    noise = torch.stack([seed_noise([5, 6], step, (4, 32, 32)) for step in range(10)])
    flat = noise.flatten(2).flatten(0, 1)  # (20, 4096)
    assert flat.dtype == torch.float32
    assert flat.mean().item() == pytest.approx(0, abs=0.015) and flat.std().item() == pytest.approx(1, abs=0.01)
    assert (torch.corrcoef(flat) - torch.eye(20)).abs().max() < 0.08  # 5 / sqrt(4096)


def test_deterministic_ddim_depends_on_the_start_alone(monkeypatch):
    steps = []
    noted = lambda seeds, step, shape: steps.append(step) or seed_noise(seeds, step, shape)  # noqa: E731
    monkeypatch.setattr("dit.sampling.seed_noise", noted)
    sample(elementwise, sampler="ddim")
    assert steps == [0]
    sample(elementwise, sampler="ddpm")
    assert steps == [0, 0, 1, 2, 3, 4]  # the last step adds no noise
    steps.clear()
    sample(elementwise, sampler="ddim", eta=1.0)
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("sampler", "eta"), [("ddpm", 0.0), ("ddim", 0.0), ("ddim", 1.0)])
def test_images_are_those_of_the_diffusions_own_loop(sampler, eta):
    diffusion = create_diffusion("5")
    options = dict(noise=seed_noise([7], 0, LATENTS), clip_denoised=False, model_kwargs={"y": torch.tensor([3])},
                   noise_fn=lambda step, x: seed_noise([7], step, LATENTS))
    model = with_guidance(elementwise, 2.0, 10)
    if sampler == "ddpm":
        latents = diffusion.p_sample_loop(model, (1, *LATENTS), **options)
    else:
        latents = diffusion.ddim_sample_loop(model, (1, *LATENTS), eta=eta, **options)
    assert torch.equal(sample(elementwise, [3], [7], sampler=sampler, eta=eta)[1], to_uint8(to_rgb(latents)))


# ---- generate ----

def test_batches_come_in_order_with_their_names():
    batches, images = sample(elementwise, batch_size=3)
    assert [batch.classes for batch in batches] == [CLASSES[:3], CLASSES[3:6], CLASSES[6:]]
    assert [batch.seeds for batch in batches] == [SEEDS[:3], SEEDS[3:6], SEEDS[6:]]
    assert images.shape == (8, 3, 8, 8) and images.dtype == torch.uint8


def test_progress_counts_the_steps_of_all_batches():
    seen = []
    sample(elementwise, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 15) for done in range(1, 16)]


def test_without_num_steps_the_diffusion_is_taken_as_it_is():
    seen = []
    list(generate(lambda x, t, y: seen.append(int(t[0])) or elementwise(x, t, y), create_diffusion("ddim4"), to_rgb,
                  [1], [1], latent_shape=LATENTS, null_class=10, cfg_scale=1.0))
    assert seen == [750, 500, 250, 0]


def test_clipping_bounds_the_pixels():
    largest = []
    for clip in (True, False):
        sample(elementwise, clip_denoised=clip, decode=lambda x: largest.append(x.abs().max()) or to_rgb(x))
    assert largest[0] <= 1 + 1e-5 < largest[1]


def test_a_model_in_training_is_sampled_in_evaluation_mode_and_gets_its_mode_back():
    model = tiny(class_dropout_prob=0.9)
    _, expected = sample(model)
    model.train()
    modes = []
    hook = model.blocks[0].register_forward_hook(lambda *_: modes.append(model.training))
    assert torch.equal(sample(model)[1], expected)
    assert model.training and not any(modes)

    hook.remove()
    model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sample(model)
    assert model.training


def test_samples_need_no_gradient_and_autocast_covers_only_the_model():
    seen = []

    def model(x, t, y):
        seen.append(("model", torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), x.dtype))
        return elementwise(x, t, y).bfloat16()

    def decode(latents):
        seen.append(("decode", torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), latents.dtype))
        return to_rgb(latents)

    sample(model, CLASSES[:2], SEEDS[:2], decode, num_steps=2, autocast=partial(torch.autocast, "cpu", torch.bfloat16))
    assert seen == [("model", True, False, torch.float32)] * 2 + [("decode", False, False, torch.float32)]
    assert torch.is_grad_enabled()


def test_unconditional_models_are_sampled_without_guidance():
    model = tiny(num_classes=0)
    _, images = sample(model, [0, 0], [1, 2], null_class=model.null_class, cfg_scale=1.0)
    assert images.shape == (2, 3, 8, 8)


# ---- messages ----

def never(*_):
    raise AssertionError("the model was called")


@pytest.mark.parametrize(("options", "message"), [
    ({"cfg_scale": 4.0, "null_class": None}, "--cfg-scale 4: the model was trained without label dropout "
                                             "(--class-dropout-prob 0) and cannot be guided; use --cfg-scale 1"),
    ({"cfg_scale": 4.0, "null_class": 0, "classes": [0], "seeds": [0]},
     "--cfg-scale 4 has no effect: the model has no classes; use --cfg-scale 1"),
    ({"cfg_scale": float("nan")}, "--cfg-scale nan: must be a finite number"),
    ({"cfg_channels": 5}, "--cfg-channels 5: must be from 1 to 4, the channels of the latents"),
    ({"cfg_channels": 0}, "--cfg-channels 0: must be from 1 to 4, the channels of the latents"),
    ({"cfg_channels": 3, "cfg_scale": 1.0}, "--cfg-channels 3 has no effect with --cfg-scale 1, which is no guidance"),
    ({"classes": [11], "seeds": [1]}, "--classes 11: the model knows 0 to 10 (10 is the null class)"),
    ({"classes": [-1], "seeds": [1]}, "--classes -1: the model knows 0 to 10 (10 is the null class)"),
    ({"classes": [1, 2], "seeds": [1]}, "2 classes for 1 seeds; there must be one seed per class"),
    ({"seeds": [-1], "classes": [1]}, "--seed -1: must be from 0 to 2^64 - 1"),
    ({"seeds": [2**64], "classes": [1]}, f"--seed {2**64}: must be from 0 to 2^64 - 1"),
    ({"sampler": "euler"}, "--sampler euler: must be ddpm or ddim"),
    ({"eta": 0.5}, "--eta 0.5 has no effect with --sampler ddpm; use --sampler ddim"),
    ({"eta": 1.5, "sampler": "ddim"}, "--eta 1.5: must be from 0 to 1"),
    ({"num_steps": 0}, "--num-sampling-steps 0: must be from 1 to 1000"),
    ({"num_steps": 1001}, "--num-sampling-steps 1001: must be from 1 to 1000"),
    ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
])
def test_mistakes_are_refused_in_one_line_before_anything_is_computed(options, message):
    options = dict(classes=CLASSES, seeds=SEEDS, latent_shape=LATENTS, null_class=10, cfg_scale=2.0) | options
    with pytest.raises(UsageError) as error:
        generate(never, create_diffusion(), never, **options)  # an iterator is not even begun
    assert str(error.value) == message


def test_labels_of_a_model_without_null_class_end_before_it():
    model = tiny(class_dropout_prob=0.0)
    with pytest.raises(UsageError, match="^--classes 10: the model knows 0 to 9$"):
        sample(model, [10], [1], null_class=model.null_class, cfg_scale=1.0)
    check_request([9], [1], None, 10)
    check_request([123], [1], None)
    with pytest.raises(UsageError, match="^--classes -1: must not be negative$"):
        check_request([-1], [1], None)


# ---- pictures ----

def test_pixels_are_rounded_to_the_nearest_level():
    pixels = torch.tensor([-2.0, -1.0, -1 + 0.9 / 255, -1 + 1.1 / 255, 0.0, 1.0, 2.0])
    assert to_uint8(pixels).tolist() == [0, 0, 0, 1, 128, 255, 255]
    levels = torch.arange(256)
    assert torch.equal(to_uint8(levels / 127.5 - 1), levels.to(torch.uint8))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_written_under_their_class_and_seed(tmp_path, channels):
    images = torch.randint(0, 256, (2, channels, 4, 6), dtype=torch.uint8)
    paths = save_images(SampleBatch(images, [7, 123], [42, 2**40]), tmp_path / "new" / "folder", scale=2)
    assert [path.name for path in paths] == ["class0007-seed000042.png", f"class0123-seed{2**40}.png"]
    for path, image in zip(paths, images, strict=True):
        pixels = torch.from_numpy(np.array(Image.open(path)))
        assert pixels.shape[:2] == (8, 12)
        assert torch.equal(pixels[::2, 1::2].reshape(4, 6, channels).permute(2, 0, 1), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_shows_the_images_row_by_row(tmp_path, channels):
    images = torch.arange(6, dtype=torch.uint8).mul(40).view(6, 1, 1, 1).expand(6, channels, 4, 4)
    for columns, rows, expected_columns in ((None, 2, 3), (2, 3, 2), (6, 1, 6)):
        grid = np.array(Image.open(save_grid(images, tmp_path / "grid.png", columns, scale=2)))
        assert grid.shape == (rows * 10 + 2, expected_columns * 10 + 2, 3)  # 8 pixels and 2 of border
        assert grid[5::10, 5::10, 0].flatten().tolist() == [0, 40, 80, 120, 160, 200]


def test_latents_are_no_picture(tmp_path):
    message = r"^images have 4 channels; a PNG file needs 1 or 3 \(decode latents first\)$"
    for write in (lambda images: save_grid(images, tmp_path / "a.png"),
                  lambda images: save_images(SampleBatch(images, [1], [1]), tmp_path)):
        with pytest.raises(UsageError, match=message):
            write(torch.zeros(1, 4, 8, 8, dtype=torch.uint8))
    assert not list(tmp_path.iterdir())
