"""Every setting of a run: typed, documented with unit and default, validated in ``dit.config_checks`` alone.

A :class:`TrainConfig` is a tree of frozen dataclasses. It is read from a TOML file (one table per section), overridden
by flags, and saved resolved as ``config.json``. This module needs neither torch nor a GPU.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Literal


class UsageError(ValueError):
    """A mistake of the user's. The message is one line: the flag or file, what was found, what would be right."""


@dataclass(frozen=True)
class ModelShape:
    """Everything that determines a DiT's parameters and the size of its tensors.

    ``input_size`` is (height, width) of what the model sees: latents, or pixels when no VAE is used.
    """

    input_size: tuple[int, int]
    patch_size: int
    in_channels: int
    hidden_size: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    class_dropout_prob: float = 0.1
    learn_sigma: bool = True

    @property
    def num_tokens(self) -> int:
        return (self.input_size[0] // self.patch_size) * (self.input_size[1] // self.patch_size)

    @property
    def out_channels(self) -> int:
        return self.in_channels * 2 if self.learn_sigma else self.in_channels

    @property
    def null_class(self) -> int:
        """The label that means "no class": one past the last class."""
        return self.num_classes


# Table 1 of "Scalable Diffusion Models with Transformers" (arXiv 2212.09748): depth, width, heads; times patch 2, 4, 8.
_SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
PRESETS: dict[str, dict[str, int]] = {
    f"DiT-{size}/{patch}": dict(depth=depth, hidden_size=width, patch_size=patch, num_heads=heads)
    for size, (depth, width, heads) in _SIZES.items()
    for patch in (2, 4, 8)
}
NUM_TIMESTEPS = 1000
IMAGE_DATA = ("folder", "webdataset", "hf")
"""Values of --data whose samples are images that a VAE encodes in the step."""
DIGITS_SIZE, DIGITS_CLASSES = 8, 10


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    model: str = "DiT-XL/2"
    """A preset, DiT-{S,B,L,XL}/{2,4,8}, or "custom" with --depth, --hidden-size, --num-heads and --patch-size."""
    image_size: int | tuple[int, int] = 256
    """Image size in pixels: one number for a square, or height and width."""
    num_classes: int = 1000
    """Number of classes. 0 trains without labels."""
    depth: int | None = None
    """Number of transformer blocks, instead of the preset's."""
    hidden_size: int | None = None
    """Width of a token, instead of the preset's. A multiple of --num-heads and of 4."""
    num_heads: int | None = None
    """Attention heads, instead of the preset's."""
    patch_size: int | None = None
    """Patch size in latent pixels, instead of the preset's."""
    class_dropout_prob: float = 0.1
    """Share of labels replaced by the null class in training; classifier-free guidance needs it above 0."""
    learn_sigma: bool = True
    """Predict the variance too (doubles the output channels), as the paper does."""


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    data: Literal["folder", "latents", "webdataset", "hf", "digits", "synthetic"] = "folder"
    """folder: class folders of images; latents: what scripts/extract_latents.py wrote; webdataset: tar files of images
    and labels; hf: a Hugging Face data set saved to disk; digits: scikit-learn's 8x8 handwritten digits, embedded;
    synthetic: random latents of the right shape, for measuring."""
    data_path: str | None = None
    """Folder of the images or latents; for webdataset also a pattern such as "train-{000..146}.tar"."""
    vae: str | None = None
    """ema or mse (the official VAEs), the path of a diffusers AutoencoderKL, or none for pixel space. Default: ema for
    images, none for digits."""
    num_workers: int = 4
    """Loader processes per device. 0 loads in the training process."""
    encode_chunk: int = 0
    """Images the VAE encodes at once when it runs in the loop. 0: the whole micro-batch."""
    classes_file: str | None = None
    """Text file with one class folder name per line: a subset, in this order."""
    augment: Literal["center-crop", "random-crop", "resize"] = "center-crop"
    """How an image becomes --image-size: the official centre crop, a random crop, or a plain resize."""
    flip: bool = True
    """Flip half of the images horizontally."""
    latent_channels: int = 4
    """Channels of the VAE's latents. Read from the VAE or the latents where they say it."""
    latent_factor: int = 8
    """Image pixels per latent pixel. Read from the VAE or the latents where they say it."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision and kernels"""

    amp: bool = False
    """Automatic mixed precision: autocast of the model's forward; weights, gradients and moments stay fp32."""
    amp_dtype: Literal["auto", "bf16", "fp16"] = "auto"
    """auto: bf16 where the device has it, else fp16 with a GradScaler."""
    tf32: bool = True
    """TF32 for fp32 matrix products and convolutions, on devices that have it."""
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Attention kernel. math is the unfused path, which stores the T x T scores."""
    compile: bool = False
    """torch.compile the model. The plan then gives the eager figure as an upper bound."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    lr: float = 1e-4
    """Learning rate after warm-up."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    clip_grad: float = 0.0
    """Largest gradient norm; gradients above are scaled down. 0: no clipping."""
    ema_decay: float = 0.9999
    """Decay of the weights' moving average, warmed up: min(decay, (1+s)/(10+s)) at step s."""
    ema: Literal["device", "host", "off"] = "device"
    """Where the average of the weights lives: on the device, in host memory (copied while the next step runs; the same
    averages), or nowhere."""
    optimizer: Literal["adamw", "adamw-foreach", "adamw-8bit", "adamw-4bit"] = "adamw"
    """adamw: the fused kernel; adamw-foreach: the multi-tensor one, which needs a temporary copy; adamw-8bit and
    adamw-4bit: moments in 8 or 4 bits (torchao), 2 or 1 bytes a parameter instead of 8."""
    max_bad_steps: int = 20
    """Consecutive steps with a non-finite loss or gradient (skipped, logged) after which the run stops."""


@dataclass(frozen=True)
class MemoryConfig:
    """Memory and devices"""

    global_batch_size: int = 256
    """Images per step over all devices: micro-batch x accumulation x devices."""
    grad_accum: int = 1
    """Micro-batches accumulated on each device per step."""
    ckpt: bool = False
    """Gradient checkpointing: recompute the blocks' activations in the backward instead of keeping them."""
    ckpt_blocks: int | None = None
    """Checkpoint the first N blocks only. Default: all."""
    ckpt_every_nth: int = 1
    """Checkpoint every N-th block only, from the first."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several devices share the work: ddp, each a whole model; fsdp, each a share of weights, gradients, moments
    and average, a block's weights being gathered while it runs."""
    shard_size: int = 0
    """Devices that hold one model between them under fsdp, for instance those of a node; groups of so many hold copies.
    0: all devices."""
    tensor_parallel: int = 1
    """Devices that compute every block together, each with a share of its heads and of its MLP."""
    on_oom: Literal["adapt", "stop"] = "adapt"
    """Out of memory during a run: adapt halves the micro-batch and doubles the accumulation, then checkpoints, repeats
    the step and goes on; stop ends the run and says what would fit."""


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    results_dir: str = "results"
    """Where new runs get their folder, NNN-<model>."""
    run_dir: str | None = None
    """The run's folder: made when missing, continued from its newest valid checkpoint file when not."""
    epochs: int = 1400
    """Passes over the data, unless --max-steps is given."""
    max_steps: int | None = None
    """Steps in all, counted from the start of the run, not of this session."""
    global_seed: int = 0
    """Seed of the weights and of every random choice in the data."""
    log_every: int = 100
    """Steps between console lines (metrics.jsonl has every step)."""
    ckpt_every: int = 50_000
    """Steps between checkpoint files. One is written at the end too."""
    keep_last: int = 3
    """Newest checkpoint files that are kept. 0 keeps all."""
    keep_every: int = 0
    """Also keep every checkpoint file whose step is a multiple of this. 0: none."""
    sample_every: int = 0
    """Steps between sample grids in samples/. 0: none."""
    resume_anyway: bool = False
    """Continue although settings differ that leave the stored state meaningful: paths, augmentation, batch size."""
    rank_timeout: float = 600.0
    """Seconds after which a job ends, naming rank and step, when one of its processes makes no progress. 0: never."""
    tracker: Literal["none", "tensorboard", "wandb", "aim", "comet_ml", "mlflow"] = "none"
    """Experiment tracker, through accelerate."""


@dataclass(frozen=True)
class TrialConfig:
    """Plan and trial"""

    trial: bool = False
    """Freeze the plan, train --trial-steps steps, hold one against the other, write report.html and stop."""
    trial_steps: int = 500
    """Length of a trial in steps."""
    plan: Literal["off", "warn", "require"] = "warn"
    """Plan the run before it starts: warn if it does not fit, or require that it fits."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a diffusion transformer.

    One process: python train.py ...; many: torchrun --nproc_per_node=8 train.py ... A file of settings goes first:
    --config FILE (see configs/), and flags override it. With --run-dir DIR the same command continues what is in DIR.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width in pixels."""
        size = self.model.image_size
        return (size, size) if isinstance(size, int) else tuple(size)

    @property
    def vae(self) -> str:
        """The VAE in use, "none" in pixel space; never None."""
        return self.data.vae or ("none" if self.data.data == "digits" else "ema")

    @property
    def encodes_in_loop(self) -> bool:
        """Whether a VAE runs inside the training step."""
        return self.data.data in IMAGE_DATA and self.vae != "none"

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of what the model sees."""
        height, width = self.image_hw
        if self.vae == "none":
            return (1 if self.data.data == "digits" else 3, height, width)
        return (self.data.latent_channels, height // self.data.latent_factor, width // self.data.latent_factor)

    @property
    def shape(self) -> ModelShape:
        """The model's shape. Raises UsageError where sizes do not fit each other."""
        preset = PRESETS.get(self.model.model, {})
        sizes = {name: getattr(self.model, name) or preset.get(name)
                 for name in ("depth", "hidden_size", "num_heads", "patch_size")}
        channels, *latent_hw = self.latent_shape
        return ModelShape(input_size=tuple(latent_hw), in_channels=channels, num_classes=self.model.num_classes,
                          class_dropout_prob=self.model.class_dropout_prob if self.model.num_classes else 0.0,
                          learn_sigma=self.model.learn_sigma, **sizes)

    @property
    def checkpointed_blocks(self) -> int:
        """Number of blocks under gradient checkpointing."""
        if not self.memory.ckpt:
            return 0
        among = -(-self.shape.depth // self.memory.ckpt_every_nth)
        return among if self.memory.ckpt_blocks is None else self.memory.ckpt_blocks

    @property
    def model_name(self) -> str:
        """The model's name in folder names: DiT-XL-2."""
        return self.model.model.replace("/", "-")

    def data_ranks(self, world_size: int) -> int:
        """Devices, or groups of --tensor-parallel devices, that see images of their own. Raises UsageError."""
        together = self.memory.tensor_parallel
        if world_size % together:
            raise UsageError(f"--tensor-parallel {together} does not divide {world_size} devices; start a multiple of "
                             f"{together} processes with torchrun --nproc_per_node")
        return world_size // together

    def micro_batch(self, world_size: int) -> int:
        """Images one device sends through the model at once. Raises UsageError if the batch does not divide."""
        batch, accumulation = self.memory.global_batch_size, self.memory.grad_accum
        world_size = self.data_ranks(world_size)
        if batch % (world_size * accumulation):
            share = world_size * accumulation
            nearest = max(share, round(batch / share) * share)
            raise UsageError(f"--global-batch-size {batch} is not divisible by {world_size} devices x --grad-accum "
                             f"{accumulation} = {share}; {nearest} would be")
        return batch // (world_size * accumulation)

    def total_steps(self, num_samples: int) -> int:
        """Steps of the whole run over a data set of ``num_samples`` images."""
        if self.trial.trial:
            return self.trial.trial_steps
        if self.run.max_steps is not None:
            return self.run.max_steps
        return max(1, self.run.epochs * num_samples // self.memory.global_batch_size)


def replace(config: TrainConfig, **changes: object) -> TrainConfig:
    """A copy with settings changed by their flag name, whichever section they are in: ``replace(c, amp=True)``."""
    by_section: dict[str, dict[str, object]] = {}
    for name, value in changes.items():
        by_section.setdefault(SECTION_OF[name], {})[name] = value
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)
                                          for section, values in by_section.items()})


def flag(name: str) -> str:
    """How a setting is written on the command line."""
    return "--" + name.replace("_", "-")


SECTIONS: dict[str, type] = {section.name: section.default_factory for section in dataclasses.fields(TrainConfig)}
SECTION_OF = {setting.name: section for section, cls in SECTIONS.items() for setting in dataclasses.fields(cls)}


def did_you_mean(word: str, known: list[str]) -> str:
    """``", did you mean X?"`` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f", did you mean {close[0]}?" if close else ""
