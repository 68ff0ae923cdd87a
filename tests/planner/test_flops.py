"""The closed forms against the model itself, on the meta device: parameters, state dict and every operation counted."""

import dataclasses
import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dit.config import PRESETS, ModelShape
from dit.model import FREQUENCY_SIZE, build_model
from dit.planner import flops

LATENT_256 = dict(input_size=(32, 32), in_channels=4)
CUSTOM = {
    "non-square": ModelShape(input_size=(16, 24), patch_size=2, in_channels=4, hidden_size=96, depth=3, num_heads=6),
    "pixels": ModelShape(input_size=(8, 8), patch_size=1, in_channels=1, hidden_size=64, depth=2, num_heads=4,
                         num_classes=10, learn_sigma=False),
    "mlp-ratio": ModelShape(input_size=(8, 8), patch_size=4, in_channels=16, hidden_size=72, depth=2, num_heads=3,
                            mlp_ratio=2.7, num_classes=5, class_dropout_prob=0.0),
    "unconditional": ModelShape(input_size=(8, 8), patch_size=2, in_channels=4, hidden_size=64, depth=1, num_heads=4,
                                num_classes=0, class_dropout_prob=0.0),
}
SHAPES = {name: ModelShape(**LATENT_256, **sizes) for name, sizes in PRESETS.items()} | CUSTOM
XL2 = SHAPES["DiT-XL/2"]


@functools.cache
def meta_model(shape, **kwargs):
    with torch.device("meta"):
        return build_model(shape, **kwargs).train()


def counted(model, shape, batch, backward=False):
    """Operations per image by FlopCounterMode, of a forward or of a forward and backward."""
    x = torch.empty(batch, shape.in_channels, *shape.input_size, device="meta")
    labels = torch.zeros(batch, dtype=torch.long, device="meta")
    drop = torch.zeros(batch, dtype=torch.bool, device="meta")
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        out = model(x, labels, labels, force_drop_ids=drop)
        if backward:
            out.sum().backward()
    assert counter.get_total_flops() % batch == 0
    return counter.get_total_flops() // batch


def test_published_figures_of_xl2():
    assert flops.parameters(XL2) == 675_129_632
    assert flops.trainable_parameters(XL2) == 674_834_720
    assert flops.state_dict_entries(XL2) == 292
    assert flops.FREQUENCY_SIZE == FREQUENCY_SIZE
    assert round(flops.forward_flops_per_image(XL2) / 1e9, 2) == 237.24


def test_is_the_formula_of_the_planner_facts():
    t, d, length, c, p = 256, 1152, 28, 4, 2
    assert flops.forward_flops_per_image(XL2) == (
        2 * t * d * c * p**2 + 24 * t * d**2 * length + 4 * t**2 * d * length + 12 * d**2 * length
        + 4 * d**2 + 2 * 256 * d + 2 * d**2 + 2 * t * d * p**2 * 2 * c)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_and_state_dict_are_the_models(name):
    shape = SHAPES[name]
    model = meta_model(shape)
    assert flops.parameters(shape) == sum(p.numel() for p in model.parameters())
    assert flops.trainable_parameters(shape) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert flops.state_dict_entries(shape) == len(model.state_dict())


@pytest.mark.parametrize("name", SHAPES)
def test_forward_equals_the_flop_counter(name):
    shape = SHAPES[name]
    model = meta_model(shape)
    assert counted(model, shape, batch=2) == flops.forward_flops_per_image(shape)
    assert sum(flops.forward_flops_by_part(shape).values()) == flops.forward_flops_per_image(shape)


@pytest.mark.parametrize("name", SHAPES)
def test_forward_and_backward_equal_the_flop_counter_with_any_number_of_blocks_checkpointed(name):
    shape = dataclasses.replace(SHAPES[name], depth=2)  # the forward's test has every depth, and all blocks are alike
    for blocks in (0, 1, 2) if name in CUSTOM else (1,):
        model = meta_model(shape, checkpoint_blocks=blocks)
        expected = flops.executed_train_flops_per_image(shape, blocks)  # meta has no fused kernel: four products
        assert counted(model, shape, batch=2, backward=True) == expected


def test_fused_attention_adds_half_an_attention_forward():
    """The counter's own rule for the flash kernels, on meta: forward 2 products, backward 5."""
    q = torch.empty(1, 6, 256, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)[0]
        out.sum().backward()
    shape = SHAPES["DiT-S/2"]
    unfused, fused = (flops.executed_train_flops_per_image(shape, fused_attention=kind) for kind in (False, True))
    per_block = (fused - unfused) // shape.depth
    attention = flops.forward_flops_by_part(shape)["attention"] // shape.depth
    assert counter.get_total_flops() == 3 * attention + per_block


def test_training_by_convention_is_three_forwards_and_one_more_of_each_checkpointed_block():
    forward, block = flops.forward_flops_per_image(XL2), flops.block_forward_flops_per_image(XL2)
    assert flops.train_flops_per_image(XL2) == 3 * forward
    assert flops.train_flops_per_image(XL2, 28) == 3 * forward + 28 * block
    assert 0.99 * 4 * forward < flops.train_flops_per_image(XL2, 28) < 4 * forward
    executed = flops.executed_train_flops_per_image(XL2)
    assert 0.999 * 3 * forward < executed < 3 * forward  # what MFU leaves out is below a thousandth


def test_six_n_over_counts():
    ratios = [6 * flops.parameters(shape) * shape.num_tokens / flops.train_flops_per_image(shape)
              for name, shape in SHAPES.items() if name in PRESETS and name.endswith("/2")]
    assert all(1.3 < ratio < 1.6 for ratio in ratios), ratios
