import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from reference import GOLDEN, TIMESTEPS, cosine_input, fill_weights, relative_error
from torch import nn

from dit.config import PRESETS, ModelShape, UsageError
from dit.model import DiT, DiT_models, TimestepEmbedder, build_model, sincos_pos_embed

TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=3, num_heads=4, num_classes=10)
PARAMETERS = {
    "DiT-S/2": 32_963_360, "DiT-S/4": 32_945_024, "DiT-S/8": 33_148_160,
    "DiT-B/2": 130_512_416, "DiT-B/4": 130_475_648, "DiT-B/8": 130_881_536,
    "DiT-L/2": 458_102_816, "DiT-L/4": 458_053_760, "DiT-L/8": 458_594_816,
    "DiT-XL/2": 675_129_632, "DiT-XL/4": 675_074_432, "DiT-XL/8": 675_683_072,
}


def batch(shape=(4, 4, 8, 8), num_classes=10):
    return cosine_input(shape), torch.tensor(TIMESTEPS), torch.tensor([0, 1, num_classes - 1, num_classes])


def tiny(**changes) -> DiT:
    return fill_weights(DiT(**{**TINY, **changes}))


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


# ---- the official numbers ----

@pytest.mark.parametrize(("case", "make", "shape"), [
    ("tiny", lambda: DiT(**TINY), (4, 4, 8, 8)),
    ("tiny_nosigma", lambda: DiT(**TINY, learn_sigma=False), (4, 4, 8, 8)),
    ("S8", lambda: DiT_models["DiT-S/8"](), (4, 4, 32, 32)),
])
@pytest.mark.parametrize("fused_attention", [True, False])
@torch.no_grad()
def test_output_equals_the_official_models(golden, case, make, shape, fused_attention):
    model = fill_weights(make()).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused_attention
    output = model(*batch(shape, model.num_classes))
    assert tuple(output.shape) == tuple(golden[f"{case}/out_shape"])
    scale = float(golden[f"{case}/out_abs_mean"])
    assert output.abs().mean().item() == pytest.approx(scale, rel=1e-5)
    assert abs(output.double().sum().item() - float(golden[f"{case}/out_sum"])) < 1e-5 * scale * output.numel()
    if case == "S8":
        output = output.flatten()[:: output.numel() // 256]
    assert relative_error(output, golden[f"{case}/out"]) < 1e-5


def test_pos_embed_is_the_official_table(golden):
    model = DiT(**TINY)
    np.testing.assert_array_equal(model.pos_embed.detach(), golden["tiny/pos_embed"])
    assert not model.pos_embed.requires_grad


# ---- parameters and names ----

@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_of_the_presets(name):
    with torch.device("meta"):
        model = DiT_models[name]()
    width, depth, patch = (PRESETS[name][key] for key in ("hidden_size", "depth", "patch_size"))
    attention_and_mlp = 4 * width * width + 4 * width + 8 * width * width + 5 * width
    block = attention_and_mlp + 6 * (width * width + width)
    ends = (4 * patch**2 * width + width) + 2 * (width * width + width) + (width * patch**2 * 8 + patch**2 * 8)
    conditioning = 256 * width + width + width * width + width + 1001 * width
    pos_embed = (32 // patch) ** 2 * width
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PARAMETERS[name] == depth * block + ends + conditioning + pos_embed
    assert all(parameter.is_meta for parameter in model.parameters())


def test_state_dict_has_the_official_names_and_shapes():
    with torch.device("meta"):
        assert len(DiT_models["DiT-XL/2"]().state_dict()) == 292
    shapes = {name: tuple(tensor.shape) for name, tensor in DiT(**{**TINY, "depth": 1}).state_dict().items()}
    linears = {
        "x_embedder.proj": (64, 4, 2, 2), "t_embedder.mlp.0": (64, 256), "t_embedder.mlp.2": (64, 64),
        "blocks.0.attn.qkv": (192, 64), "blocks.0.attn.proj": (64, 64), "blocks.0.mlp.fc1": (256, 64),
        "blocks.0.mlp.fc2": (64, 256), "blocks.0.adaLN_modulation.1": (384, 64),
        "final_layer.linear": (32, 64), "final_layer.adaLN_modulation.1": (128, 64),
    }
    expected = {"pos_embed": (1, 16, 64), "y_embedder.embedding_table.weight": (11, 64)}
    for name, shape in linears.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    assert shapes == expected


def test_build_model_follows_the_shape():
    shape = ModelShape(input_size=(4, 8), patch_size=2, in_channels=3, hidden_size=32, depth=2, num_heads=2,
                       mlp_ratio=2.0, num_classes=5, class_dropout_prob=0.0, learn_sigma=False)
    model = build_model(shape, checkpoint_blocks=1, fused_attention=False)
    assert model.pos_embed.shape == (1, shape.num_tokens, 32)
    assert model.out_channels == shape.out_channels == 3
    assert model.blocks[0].mlp.fc1.out_features == 64
    assert model.y_embedder.embedding_table.num_embeddings == 5
    assert model.null_class is None
    assert (len(model.blocks), model.checkpoint_blocks, model.blocks[1].attn.fused_attn) == (2, 1, False)
    assert build_model(ModelShape((8, 8), 2, 4, 32, 1, 2)).null_class == 1000


# ---- initialisation ----

def test_output_is_exactly_zero_at_the_start():
    model = DiT(**TINY)
    assert torch.equal(model(*batch()), torch.zeros(4, 8, 8, 8))


def test_initialisation_is_the_official_one():
    torch.manual_seed(0)
    model = DiT(**{**TINY, "hidden_size": 128, "num_classes": 1000})
    state = model.state_dict()
    zeroed = ("adaLN_modulation.1.weight", "final_layer.linear.weight", "bias")
    for name, tensor in state.items():
        if name.endswith(zeroed):
            assert not tensor.any(), name
        elif name.startswith(("t_embedder", "y_embedder")):
            assert tensor.std().item() == pytest.approx(0.02, rel=0.05), name
        elif name != "pos_embed":
            rows, columns = tensor.flatten(1).shape
            bound = math.sqrt(6 / (rows + columns))  # Glorot & Bengio 2010, Eq. 16
            assert tensor.abs().max().item() <= bound, name
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    assert not torch.equal(state["blocks.0.attn.qkv.weight"], state["blocks.1.attn.qkv.weight"])


def test_initialisation_follows_the_seed():
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(DiT(**TINY).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["x_embedder.proj.weight"], states[2]["x_embedder.proj.weight"])


def test_modules_outside_are_still_initialised_by_torch():
    DiT(**TINY)
    assert nn.Linear(64, 64).weight.std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.1)


def test_a_meta_model_can_be_given_memory_later():
    with torch.device("meta"):
        model = DiT(**TINY)
    model.to_empty(device="cpu")
    model.initialize_weights()
    assert torch.equal(model.pos_embed, DiT(**TINY).pos_embed)
    assert not model(*batch()).any()


# ---- shapes ----

@pytest.mark.parametrize(("input_size", "grid"), [((8, 8), (4, 4)), ((4, 12), (2, 6)), ((12, 4), (6, 2))])
def test_shapes_at_every_stage(input_size, grid):
    model = tiny(input_size=input_size)
    shapes = {}
    stages = {"x_embedder": model.x_embedder, "t_embedder": model.t_embedder, "y_embedder": model.y_embedder,
              "block": model.blocks[1], "attention": model.blocks[1].attn, "mlp": model.blocks[1].mlp,
              "modulation": model.blocks[1].adaLN_modulation, "final_layer": model.final_layer}
    for name, module in stages.items():
        module.register_forward_hook(lambda _, __, output, name=name: shapes.update({name: tuple(output.shape)}))
    output = model(*batch((4, 4, *input_size)))
    tokens = grid[0] * grid[1]
    assert shapes == {"x_embedder": (4, tokens, 64), "t_embedder": (4, 64), "y_embedder": (4, 64),
                      "block": (4, tokens, 64), "attention": (4, tokens, 64), "mlp": (4, tokens, 64),
                      "modulation": (4, 384), "final_layer": (4, tokens, 2 * 2 * 8)}
    assert output.shape == (4, 8, *input_size)


def test_unpatchify_puts_every_pixel_in_its_place():
    model = DiT(**{**TINY, "input_size": (4, 6), "learn_sigma": False, "in_channels": 3})
    latents = cosine_input((2, 3, 4, 6))
    patches = torch.stack([latents[:, :, row:row + 2, column:column + 2].permute(0, 2, 3, 1).flatten(1)
                           for row in (0, 2) for column in (0, 2, 4)], dim=1)
    assert torch.equal(model.unpatchify(patches), latents)


def test_pos_embed_of_a_rectangle():
    table = sincos_pos_embed(8, 2, 3)[0]
    for row in range(2):
        for column in range(3):
            expected = [f(place * w) for place in (column, row) for f in (math.sin, math.cos) for w in (1.0, 0.01)]
            np.testing.assert_allclose(table[row * 3 + column], expected, rtol=1e-6, atol=1e-7)


def test_timestep_features():
    features = TimestepEmbedder.features(torch.tensor([0, 999]))
    assert features.dtype == torch.float32
    angles = 999 * np.exp(-math.log(10_000) * np.arange(128) / 128)
    np.testing.assert_allclose(features[1], np.concatenate([np.cos(angles), np.sin(angles)]), atol=2e-4)  # fp32 angles
    np.testing.assert_array_equal(features[0], np.repeat([1.0, 0.0], 128))


# ---- labels ----

@torch.no_grad()
def test_dropped_labels_are_the_null_class():
    model = tiny()
    x, t, y = batch()
    drop = torch.tensor([True, False, True, False])
    expected = model.eval()(x, t, torch.where(drop, 10, y))
    assert not torch.equal(expected, model(x, t, y))
    for mode in (True, False):
        assert torch.equal(model.train(mode)(x, t, y, force_drop_ids=drop), expected)


@torch.no_grad()
def test_labels_are_dropped_at_random_in_training_only():
    model = tiny(class_dropout_prob=0.5)
    torch.manual_seed(0)
    labels = torch.arange(10).repeat(200)
    null = model.y_embedder.embedding_table.weight[10]
    dropped = (model.train().y_embedder(labels) == null).all(dim=1).float().mean().item()
    assert dropped == pytest.approx(0.5, abs=0.05)
    assert not (model.eval().y_embedder(labels) == null).all(dim=1).any()
    never = torch.zeros(2000, dtype=torch.bool)
    assert not (model.train().y_embedder(labels, never) == null).all(dim=1).any()


def test_no_null_row_without_label_dropout():
    model = tiny(class_dropout_prob=0.0)
    assert model.y_embedder.embedding_table.num_embeddings == 10
    assert model.null_class is None
    x, t, y = batch()
    y = y.clamp(max=9)
    assert torch.equal(model.train()(x, t, y), model(x, t, y, force_drop_ids=torch.zeros(4, dtype=torch.bool)))


@pytest.mark.parametrize("class_dropout_prob", [0.0, 0.1])
def test_unconditional_model_has_one_embedding_and_ignores_labels(class_dropout_prob):
    model = tiny(num_classes=0, class_dropout_prob=class_dropout_prob).train()
    assert model.y_embedder.embedding_table.num_embeddings == 1
    assert model.null_class == 0
    x, t, y = batch()
    output = model(x, t)
    assert torch.equal(output, model(x, t, y))
    assert torch.equal(output, model(x, t, y, force_drop_ids=torch.ones(4, dtype=torch.bool)))


# ---- attention, checkpointing, precision, meta ----

def test_fused_and_unfused_attention_agree_and_are_what_they_say(monkeypatch):
    calls = []
    name, fused = "scaled_dot_product_attention", nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, name, lambda *args, **kwargs: calls.append(1) or fused(*args, **kwargs))
    with torch.no_grad():
        first = tiny()(*batch())
        assert len(calls) == TINY["depth"]
        second = tiny(fused_attention=False)(*batch())
    assert len(calls) == TINY["depth"]
    assert relative_error(first, second) < 1e-6


def gradients(model: DiT) -> dict[str, torch.Tensor]:
    model.zero_grad()
    drop = torch.tensor([False, True, False, False])
    (model(*batch(), force_drop_ids=drop) * cosine_input((4, 8, 8, 8), 1.0, 0.7)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("checkpoint_blocks", [1, 2, 3])
def test_checkpointing_gives_bitwise_the_same_gradients(checkpoint_blocks):
    plain = tiny().train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.checkpoint_blocks = checkpoint_blocks
    expected, actual = gradients(plain), gradients(checkpointed)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert torch.equal(gradient, actual[name]), name


def count_block_calls(model: DiT) -> list[int]:
    calls = [0] * len(model.blocks)
    for index, block in enumerate(model.blocks):
        # The attention's projection is always reached; the recompute may stop early after it.
        block.attn.proj.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    return calls


@pytest.mark.parametrize("checkpoint_blocks", [0, 2, 3])
def test_the_first_blocks_are_recomputed(checkpoint_blocks):
    model = tiny(checkpoint_blocks=checkpoint_blocks).train()
    calls = count_block_calls(model)
    gradients(model)
    assert calls == [2] * checkpoint_blocks + [1] * (3 - checkpoint_blocks)


def test_checkpointing_is_for_training_with_gradients():
    model = tiny(checkpoint_blocks=3).eval()
    calls = count_block_calls(model)
    gradients(model)
    with torch.no_grad():
        model.train()(*batch())
    assert calls == [2, 2, 2]  # once per forward


def test_checkpointing_uses_the_models_contexts():
    entered = []

    @contextlib.contextmanager
    def note(what):
        entered.append(what)
        yield

    model = tiny(checkpoint_blocks=2).train()
    model.checkpoint_context_fn = lambda: (note("forward"), note("recompute"))
    with torch.no_grad():
        model(*batch())
    assert entered == []
    gradients(model)
    assert entered == ["forward"] * 2 + ["recompute"] * 2


def test_bf16_autocast_stays_near_fp32():
    model = tiny().train()
    expected = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*batch())
    assert output.dtype == torch.bfloat16
    with torch.no_grad():
        assert relative_error(output.float(), model.eval()(*batch())) < 0.03
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(model.train())
    assert all(actual[name].dtype == torch.float32 for name in expected)
    total = torch.cat([gradient.flatten() for gradient in expected.values()])
    assert (total - torch.cat([actual[name].flatten() for name in expected])).norm() / total.norm() < 0.03


def test_a_model_of_half_weights_runs():
    model = tiny().to(torch.bfloat16)
    x, t, y = batch()
    assert model(x.bfloat16(), t, y).dtype == torch.bfloat16


def test_training_on_meta_needs_no_values():
    """On meta every read of a value raises, so this also shows that a step never waits for the device."""
    with torch.device("meta"):
        model = DiT(**TINY, checkpoint_blocks=2).train()
        x, t = torch.empty(4, 4, 8, 8), torch.empty(4, dtype=torch.long)
        for drop in (None, torch.empty(4, dtype=torch.bool)):
            model(x, t, t, force_drop_ids=drop).sum().backward()
    gradients_missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert gradients_missing == ["pos_embed"]


def test_builds_under_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model = DiT(**TINY)
    assert model.pos_embed.device.type == model.blocks[0].attn.qkv.weight.device.type == "cuda"


# ---- messages ----

@pytest.mark.parametrize(("changes", "message"), [
    ({"input_size": 9}, "input_size 9x9 is not a multiple of patch_size 2"),
    ({"input_size": (8, 7)}, "input_size 8x7 is not a multiple of patch_size 2"),
    ({"hidden_size": 62, "num_heads": 2}, "hidden_size 62 is not a multiple of 4 and of num_heads 2"),
    ({"hidden_size": 64, "num_heads": 5}, "hidden_size 64 is not a multiple of 4 and of num_heads 5"),
    ({"checkpoint_blocks": 4}, "checkpoint_blocks 4: the model has 3 blocks"),
    ({"checkpoint_blocks": -1}, "checkpoint_blocks -1: the model has 3 blocks"),
    ({"depth": 0}, "input_size (8, 8), patch_size 2, hidden_size 64, num_heads 4, depth 0: all must be above 0"),
])
def test_sizes_that_do_not_fit_are_refused_in_one_line(changes, message):
    with pytest.raises(UsageError) as error:
        DiT(**{**TINY, **changes})
    assert str(error.value) == message
