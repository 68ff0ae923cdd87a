"""Closed forms of a DiT's parameters and floating-point operations, counted from its shape alone.

An independent check of what the tracer counts, and the numerator of MFU. A multiply-add is two operations; only matrix
products count (linear layers, the patch embedding, the two products of attention), as ``FlopCounterMode`` counts them.
Letters: T tokens, D width, L depth, p patch size, C channels, r MLP ratio. Needs no torch.

The rule "6 x parameters x tokens" over-counts DiT by 1.39 to 1.50, because adaLN's weights act once per image, not once
per token: it is not used here.
"""

from dit.config import ModelShape

FREQUENCY_SIZE = 256  # sinusoidal features of a timestep, before the embedder's first linear layer


def parameters_by_part(shape: ModelShape) -> dict[str, int]:
    """Number of parameters per part; sums to :func:`parameters`. ``pos_embed`` is fixed, the rest is trained."""
    width, patch_area = shape.hidden_size, shape.patch_size**2
    hidden = int(width * shape.mlp_ratio)
    return {
        "pos_embed": shape.num_tokens * width,
        "patch_embed": shape.in_channels * patch_area * width + width,
        "timestep_embed": FREQUENCY_SIZE * width + width + width**2 + width,
        "label_embed": label_rows(shape) * width,
        "attention": shape.depth * (3 * width**2 + 3 * width + width**2 + width),
        "mlp": shape.depth * (2 * width * hidden + hidden + width),
        "modulation": shape.depth * (6 * width**2 + 6 * width),
        "final": 2 * width**2 + 2 * width + (width + 1) * patch_area * shape.out_channels,
    }


def block_parameters(shape: ModelShape) -> tuple[int, int]:
    """(parameters of one block, parameters outside of blocks, the fixed position table among them)."""
    parts = parameters_by_part(shape)
    block = (parts["attention"] + parts["mlp"] + parts["modulation"]) // shape.depth
    return block, parameters(shape) - shape.depth * block


def label_rows(shape: ModelShape) -> int:
    """Rows of the label table: one per class, and the null class if labels are ever dropped or there are no classes."""
    return shape.num_classes + (shape.class_dropout_prob > 0 or shape.num_classes == 0)


def parameters(shape: ModelShape) -> int:
    """Number of parameters, the fixed position embedding included (DiT-XL/2 at 256 px: 675,129,632)."""
    return sum(parameters_by_part(shape).values())


def trainable_parameters(shape: ModelShape) -> int:
    """Number of parameters that the optimizer updates: all but the position embedding."""
    return parameters(shape) - parameters_by_part(shape)["pos_embed"]


def state_dict_entries(shape: ModelShape) -> int:
    """Entries of the state dict: 10 per block and 12 outside (DiT-XL/2: 292)."""
    return 10 * shape.depth + 12


def forward_flops_by_part(shape: ModelShape) -> dict[str, int]:
    """Operations of one image's forward, per part; sums to :func:`forward_flops_per_image`.

    ``attention`` is the two T x T products; the linear layers around them are ``qkv`` and ``proj``.
    """
    tokens, width, depth = shape.num_tokens, shape.hidden_size, shape.depth
    patch_area, hidden = shape.patch_size**2, int(shape.hidden_size * shape.mlp_ratio)
    return {
        "patch_embed": 2 * tokens * width * shape.in_channels * patch_area,
        "timestep_embed": 2 * FREQUENCY_SIZE * width + 2 * width**2,
        "qkv": depth * 2 * tokens * 3 * width**2,
        "attention": depth * 2 * 2 * tokens**2 * width,
        "proj": depth * 2 * tokens * width**2,
        "mlp": depth * 2 * 2 * tokens * width * hidden,
        "modulation": depth * 2 * 6 * width**2,
        "final": 2 * 2 * width**2 + 2 * tokens * width * patch_area * shape.out_channels,
    }


def forward_flops_per_image(shape: ModelShape) -> int:
    """Operations of one image's forward (DiT-XL/2 at 256 px: 237.24 GFLOP)."""
    return sum(forward_flops_by_part(shape).values())


def block_forward_flops_per_image(shape: ModelShape) -> int:
    """Operations of one image's forward through one transformer block: what checkpointing that block repeats."""
    parts = forward_flops_by_part(shape)
    return sum(parts[name] for name in ("qkv", "attention", "proj", "mlp", "modulation")) // shape.depth


def train_flops_per_image(shape: ModelShape, checkpoint_blocks: int = 0) -> int:
    """Operations of one image's forward and backward by the usual convention: three forwards, plus one more of each of
    the ``checkpoint_blocks`` blocks that are recomputed.

    MFU takes ``checkpoint_blocks=0`` whatever the run does: recomputation is work, not progress.
    """
    assert 0 <= checkpoint_blocks <= shape.depth, f"{checkpoint_blocks} of {shape.depth} blocks checkpointed"
    return 3 * forward_flops_per_image(shape) + checkpoint_blocks * block_forward_flops_per_image(shape)


def executed_train_flops_per_image(shape: ModelShape, checkpoint_blocks: int = 0, fused_attention: bool = False) -> int:
    """Operations that really run: the convention less two gradients nobody needs, plus what fused attention repeats.

    The gradients with respect to the latents and to the timestep's sinusoids are not computed. A fused attention kernel
    keeps no scores: its backward has five T x T products instead of four. ``FlopCounterMode`` counts the same.
    """
    parts = forward_flops_by_part(shape)
    unneeded = parts["patch_embed"] + 2 * FREQUENCY_SIZE * shape.hidden_size
    repeated_scores = parts["attention"] // 2 if fused_attention else 0
    return train_flops_per_image(shape, checkpoint_blocks) - unneeded + repeated_scores
