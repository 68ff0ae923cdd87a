"""The model against an independent implementation: diffusers' DiTTransformer2DModel with the same weights."""

import pytest
import torch
from diffusers import DiTTransformer2DModel
from reference import TIMESTEPS, cosine_input, fill_weights, relative_error
from torch import Tensor

from dit.model import DiT

SIZES = {
    "small": dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=3, num_heads=4, num_classes=10),
    "wider": dict(input_size=16, patch_size=4, in_channels=3, hidden_size=192, depth=5, num_heads=3, num_classes=100),
}
RENAMED = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
    "t_embedder.mlp.0": "timestep_embedder.linear_1",
    "t_embedder.mlp.2": "timestep_embedder.linear_2",
    "y_embedder.embedding_table": "class_embedder.embedding_table",
}


def diffusers_names(name: str, depth: int) -> list[list[str]]:
    """The parameters of diffusers' model that hold ours: a list of copies, each a list of parts to concatenate.

    diffusers keeps query, key and value apart, and gives every block its own copy of both embedders.
    """
    module, kind = name.rsplit(".", 1)
    if module.startswith(("t_embedder", "y_embedder")):
        return [[f"transformer_blocks.{index}.norm1.emb.{RENAMED[module]}.{kind}"] for index in range(depth)]
    if not module.startswith("blocks"):
        return [[f"{RENAMED[module]}.{kind}"]]
    _, index, inner = module.split(".", 2)
    block = f"transformer_blocks.{index}"
    if inner == "attn.qkv":
        return [[f"{block}.attn1.to_{part}.{kind}" for part in "qkv"]]
    return [[f"{block}.{RENAMED[inner]}.{kind}"]]


def pair(size: dict) -> tuple[DiT, DiTTransformer2DModel]:
    ours = fill_weights(DiT(**size)).eval()
    width, heads, depth = size["hidden_size"], size["num_heads"], size["depth"]
    theirs = DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=width // heads, in_channels=size["in_channels"],
        out_channels=2 * size["in_channels"], num_layers=depth, sample_size=size["input_size"],
        patch_size=size["patch_size"], num_embeds_ada_norm=size["num_classes"], norm_eps=1e-6, norm_num_groups=1).eval()
    for block in theirs.transformer_blocks:
        # diffusers divides the exponents of the timestep features by 127, DiT's paper code by 128.
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    parameters = dict(theirs.named_parameters())
    unset = set(parameters)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name == "pos_embed":
                continue
            for parts in diffusers_names(name, depth):
                for part, chunk in zip(parts, parameter.chunk(len(parts)), strict=True):
                    parameters[part].copy_(chunk)
                    unset.remove(part)
    assert not unset
    return ours, theirs


def mapped_gradient(name: str, parameters: dict[str, Tensor], depth: int) -> Tensor:
    """The gradient of our parameter from those of diffusers' parameters: summed over copies."""
    return sum(torch.cat([parameters[part].grad for part in parts]) for parts in diffusers_names(name, depth))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_output_and_all_gradients_equal_diffusers(size):
    ours, theirs = pair(size)
    x = cosine_input((4, size["in_channels"], size["input_size"], size["input_size"]))
    t, y = torch.tensor(TIMESTEPS), torch.tensor([0, 1, size["num_classes"] - 1, size["num_classes"]])
    with torch.no_grad():
        assert relative_error(ours(x, t, y), theirs(x, t, y).sample) < 1e-5

    # In float64, so that a wrong term cannot hide behind rounding.
    ours.double(), theirs.double()
    x_ours, x_theirs = x.double().requires_grad_(), x.double().requires_grad_()
    output, expected = ours(x_ours, t, y), theirs(x_theirs, t, y).sample
    weights = cosine_input(tuple(output.shape), 1.0, 0.7)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative_error(output, expected.detach()) < 1e-12
    assert relative_error(x_ours.grad, x_theirs.grad) < 1e-12
    parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if name != "pos_embed":
            assert relative_error(parameter.grad, mapped_gradient(name, parameters, size["depth"])) < 1e-12, name


def test_position_tables_are_equal():
    ours, theirs = pair(SIZES["small"])
    assert relative_error(ours.pos_embed, theirs.pos_embed.pos_embed) < 1e-6
