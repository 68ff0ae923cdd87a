"""The diffusion transformer DiT of Peebles & Xie, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748).

State-dict names and shapes are those of the official checkpoint files. Patch embedding, attention and MLP are timm's.
Letters in shape comments: N images, C channels, H x W latent pixels, p patch size, T = H*W/p^2 tokens, D width.
"""

import math
from functools import partial

import torch
from timm.layers import Attention, Mlp, PatchEmbed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from dit.config import PRESETS, ModelShape, UsageError

FREQUENCY_SIZE = 256  # sinusoidal features per timestep
MAX_PERIOD = 10_000.0


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Adaptive layer norm's affine part: x (N, T, D), shift and scale (N, D), one pair per image."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    """Timesteps (N,) -> (N, D): sinusoidal features of the step (Vaswani et al. 2017, section 3.5), then an MLP."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCY_SIZE, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    @staticmethod
    def features(t: Tensor) -> Tensor:
        """Timesteps (N,), integer or not -> (N, 256) float32, cosines before sines."""
        half = FREQUENCY_SIZE // 2
        exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
        angles = t[:, None].float() * torch.exp(-math.log(MAX_PERIOD) * exponents)  # (N, 128)
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)

    def forward(self, t: Tensor) -> Tensor:
        # The cast changes something only for a model whose weights themselves are half precision.
        return self.mlp(self.features(t).to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    """Labels (N,) -> (N, D). The row after the last class stands for "no class".

    The table has ``num_classes`` rows, plus the null row if labels are ever dropped or if there are no classes at all:
    an unconditional model (``num_classes=0``) has just the null row.
    """

    def __init__(self, num_classes: int, hidden_size: int, dropout_prob: float):
        super().__init__()
        self.has_null_class = dropout_prob > 0 or num_classes == 0
        self.embedding_table = nn.Embedding(num_classes + self.has_null_class, hidden_size)
        self.num_classes = num_classes
        self.dropout_prob = dropout_prob

    def forward(self, labels: Tensor, force_drop_ids: Tensor | None = None) -> Tensor:
        if force_drop_ids is None and self.training and self.dropout_prob > 0:
            force_drop_ids = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
        if force_drop_ids is not None:
            labels = torch.where(force_drop_ids.bool(), self.num_classes, labels)
        return self.embedding_table(labels)


class DiTBlock(nn.Module):
    """Transformer block with adaptive layer norm and zero-initialised gates (adaLN-Zero, section 3.2)."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, fused_attention: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads=num_heads, qkv_bias=True)
        self.attn.fused_attn = fused_attention  # timm reads an environment variable; here the argument decides
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=partial(nn.GELU, approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.adaLN_modulation(c).chunk(6, dim=1)  # six (N, D)
        x = x + gate_1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_1, scale_1))  # (N, T, D)
        x = x + gate_2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_2, scale_2))  # (N, T, D)
        return x


class FinalLayer(nn.Module):
    """Tokens (N, T, D) -> patches (N, T, p*p*channels)."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)  # two (N, D)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """Diffusion transformer: noised latents, timestep and label -> predicted noise (and variance).

    Args:
        input_size: height and width of the latents in latent pixels; one number means a square.
        patch_size: latent pixels per side of a token.
        in_channels: channels of the latents.
        hidden_size: width D of a token; a multiple of 4 and of ``num_heads``.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: width of the MLP over D.
        class_dropout_prob: share of labels dropped in training when ``forward`` gets no ``force_drop_ids``. With 0 the
            table has no null row and guidance is not possible.
        num_classes: 0 makes an unconditional model, which ignores its labels.
        learn_sigma: predict the variance too: 2C output channels instead of C.
        checkpoint_blocks: so many blocks, counted from the first, recompute their activations in the backward.
        checkpoint_every: they are every so manyth block: 2 is blocks 0, 2, 4 ...
        fused_attention: scaled_dot_product_attention; False is the unfused path, which stores the T x T scores.

    Raises UsageError where sizes do not fit each other.
    """

    def __init__(self, input_size: int | tuple[int, int] = 32, patch_size: int = 2, in_channels: int = 4,
                 hidden_size: int = 1152, depth: int = 28, num_heads: int = 16, mlp_ratio: float = 4.0,
                 class_dropout_prob: float = 0.1, num_classes: int = 1000, learn_sigma: bool = True, *,
                 checkpoint_blocks: int = 0, checkpoint_every: int = 1, fused_attention: bool = True):
        super().__init__()
        self.input_size = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
        _check_sizes(self.input_size, patch_size, hidden_size, num_heads, depth, checkpoint_blocks)
        self.patch_size, self.in_channels, self.num_heads = patch_size, in_channels, num_heads
        self.num_classes, self.learn_sigma = num_classes, learn_sigma
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        self.checkpoint_blocks, self.checkpoint_every = checkpoint_blocks, checkpoint_every
        self.checkpoint_context_fn = noop_context_fn

        with _SkipRandomFill():  # torch's own initialisation costs more than ours, which overwrites it
            self.x_embedder = PatchEmbed(self.input_size, patch_size, in_channels, hidden_size)
            self.t_embedder = TimestepEmbedder(hidden_size)
            self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
            # A parameter, as in the official checkpoint files, but not trained.
            self.pos_embed = nn.Parameter(torch.empty(1, self.x_embedder.num_patches, hidden_size), requires_grad=False)
            self.blocks = nn.ModuleList(
                DiTBlock(hidden_size, num_heads, mlp_ratio, fused_attention) for _ in range(depth))
            self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()

    @property
    def null_class(self) -> int | None:
        """The label that means "no class", or None if the model has no embedding for it."""
        return self.num_classes if self.y_embedder.has_null_class else None

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """The official initialisation, with which the output is exactly 0. Also fills a model that was built on the
        meta device and then given memory by ``to_empty``."""
        self.pos_embed.copy_(sincos_pos_embed(self.pos_embed.shape[-1], *self.x_embedder.grid_size))
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        nn.init.zeros_(self.x_embedder.proj.bias)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for linear in (self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for block in self.blocks:
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        zeroed = [block.adaLN_modulation[1] for block in self.blocks]
        for linear in (*zeroed, self.final_layer.adaLN_modulation[1], self.final_layer.linear):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def unpatchify(self, x: Tensor) -> Tensor:
        """Patches (N, T, p*p*c) -> latents (N, c, H, W)."""
        (h, w), p = self.x_embedder.grid_size, self.patch_size
        x = x.reshape(x.shape[0], h, w, p, p, self.out_channels)  # (N, H/p, W/p, p, p, c)
        x = x.permute(0, 5, 1, 3, 2, 4)  # (N, c, H/p, p, W/p, p)
        return x.reshape(x.shape[0], self.out_channels, h * p, w * p)

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, force_drop_ids: Tensor | None = None) -> Tensor:
        """Predict the noise in x.

        Args:
            x: (N, C, H, W) noised latents.
            t: (N,) timesteps.
            y: (N,) int64 labels in [0, num_classes], ``num_classes`` being the null class; unused without classes.
            force_drop_ids: (N,) bool, labels to replace by the null class. None drops at random in training mode. In a
                model without null class no entry may be True.

        Returns (N, C, H, W), or (N, 2C, H, W) with the variance after the noise if ``learn_sigma``.
        """
        if self.num_classes == 0:
            y = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        # The patch embedding leaves its output transposed, and every norm after it would copy it again.
        x = (self.x_embedder(x) + self.pos_embed).contiguous()  # (N, T, D), where T = H * W / p^2
        c = self.t_embedder(t) + self.y_embedder(y, force_drop_ids)  # (N, D)
        num_checkpointed = self.checkpoint_blocks if self.training and torch.is_grad_enabled() else 0
        for index, block in enumerate(self.blocks):
            if index % self.checkpoint_every == 0 and index // self.checkpoint_every < num_checkpointed:
                # Nothing in a block is random, so no generator state need be kept.
                x = checkpoint(block, x, c, use_reentrant=False, preserve_rng_state=False,
                               context_fn=self.checkpoint_context_fn)  # (N, T, D)
            else:
                x = block(x, c)  # (N, T, D)
        x = self.final_layer(x, c)  # (N, T, p*p*c), c output channels
        return self.unpatchify(x)  # (N, c, H, W)


class _SkipRandomFill(TorchFunctionMode):
    """Modules made inside keep their memory as it is where they would fill it with random numbers."""

    FILLS = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _check_sizes(input_size: tuple[int, int], patch_size: int, hidden_size: int, num_heads: int, depth: int,
                 checkpoint_blocks: int) -> None:
    if min(*input_size, patch_size, hidden_size, num_heads, depth) <= 0:
        raise UsageError(f"input_size {input_size}, patch_size {patch_size}, hidden_size {hidden_size}, num_heads "
                         f"{num_heads}, depth {depth}: all must be above 0")
    if input_size[0] % patch_size or input_size[1] % patch_size:
        raise UsageError(f"input_size {input_size[0]}x{input_size[1]} is not a multiple of patch_size {patch_size}")
    if hidden_size % num_heads or hidden_size % 4:
        raise UsageError(f"hidden_size {hidden_size} is not a multiple of 4 and of num_heads {num_heads}")
    if not 0 <= checkpoint_blocks <= depth:
        raise UsageError(f"checkpoint_blocks {checkpoint_blocks}: the model has {depth} blocks")


def sincos_pos_embed(hidden_size: int, height: int, width: int) -> Tensor:
    """Fixed position table (1, height*width, hidden_size) float32 of a grid of tokens, rows first, computed in float64.

    The first half of the channels encodes the column, the second half the row; in each half sines stand before cosines
    (the order of the official checkpoint files). On the CPU, so that it has numbers under a default device of meta.
    """
    quarter = hidden_size // 4
    exponents = torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter
    frequencies = torch.exp(-math.log(MAX_PERIOD) * exponents)  # (D/4,)

    def encode(length: int) -> Tensor:
        angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequencies
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)  # (length, D/2)

    columns = encode(width)[None, :].expand(height, -1, -1)
    rows = encode(height)[:, None].expand(-1, width, -1)
    return torch.cat([columns, rows], dim=-1).reshape(1, height * width, hidden_size).float()


def build_model(shape: ModelShape, **kwargs: object) -> DiT:
    """The model of a shape; keyword arguments are DiT's ``checkpoint_...`` and ``fused_attention``."""
    return DiT(input_size=shape.input_size, patch_size=shape.patch_size, in_channels=shape.in_channels,
               hidden_size=shape.hidden_size, depth=shape.depth, num_heads=shape.num_heads, mlp_ratio=shape.mlp_ratio,
               class_dropout_prob=shape.class_dropout_prob, num_classes=shape.num_classes,
               learn_sigma=shape.learn_sigma, **kwargs)


DiT_models = {name: partial(DiT, **sizes) for name, sizes in PRESETS.items()}
"""The paper's twelve models by name: ``DiT_models["DiT-XL/2"](input_size=32)``."""
