"""What a combination of settings must satisfy; a mistake is one line that names the flag and what would be right."""

from dit.config import (
    DIGITS_CLASSES,
    DIGITS_SIZE,
    IMAGE_DATA,
    PRESETS,
    SECTION_OF,
    TrainConfig,
    UsageError,
    did_you_mean,
    flag,
)

_POSITIVE = ("depth", "hidden_size", "num_heads", "patch_size", "latent_channels", "latent_factor", "lr",
             "global_batch_size", "grad_accum", "epochs", "max_steps", "log_every", "ckpt_every", "trial_steps",
             "max_bad_steps", "ckpt_every_nth", "tensor_parallel")
_NOT_NEGATIVE = ("num_classes", "num_workers", "encode_chunk", "weight_decay", "warmup_steps", "clip_grad",
                 "ckpt_blocks", "keep_last", "keep_every", "sample_every", "global_seed",
                 "rank_timeout", "shard_size")


def validate(config: TrainConfig) -> TrainConfig:
    """Return the config unchanged, or raise UsageError naming the first setting that cannot be."""
    _check_numbers(config)
    _check_model(config)
    _check_toggles(config)
    return config


def _check_numbers(config: TrainConfig) -> None:
    for name, section in SECTION_OF.items():
        value = getattr(getattr(config, section), name)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise UsageError(f"{flag(name)} {value}: must be a finite number")
        if value is None or isinstance(value, str | bool):
            continue
        if name in _POSITIVE and value <= 0:
            raise UsageError(f"{flag(name)} {value}: must be above 0")
        if name in _NOT_NEGATIVE and value < 0:
            raise UsageError(f"{flag(name)} {value}: must not be negative")
    for name, section in (("class_dropout_prob", config.model), ("ema_decay", config.optim)):
        if not 0 <= getattr(section, name) < 1:
            raise UsageError(f"{flag(name)} {getattr(section, name)}: must be at least 0 and below 1")
    if min(config.image_hw) <= 0:
        raise UsageError(f"--image-size {config.model.image_size}: must be above 0")


def _check_model(config: TrainConfig) -> None:
    model = config.model
    if model.model not in PRESETS:
        sizes = ("depth", "hidden_size", "num_heads", "patch_size")
        missing = [flag(name) for name in sizes if not getattr(model, name)]
        if model.model != "custom":
            raise UsageError(f"--model {model.model}: unknown{did_you_mean(model.model, [*PRESETS, 'custom'])}; "
                             "models are DiT-{S,B,L,XL}/{2,4,8} or custom")
        if missing:
            raise UsageError(f"--model custom needs {', '.join(missing)} too")
    for side in config.image_hw:
        if config.vae != "none" and side % config.data.latent_factor:
            raise UsageError(f"--image-size {side} is not a multiple of {config.data.latent_factor}, the VAE's factor")
    if config.data.data == "digits" and (config.vae != "none" or config.image_hw != (DIGITS_SIZE, DIGITS_SIZE)):
        raise UsageError(f"--data digits are {DIGITS_SIZE}x{DIGITS_SIZE} pixels without a VAE; "
                         f"use --image-size {DIGITS_SIZE} and no --vae")
    if config.data.data == "digits" and model.num_classes not in (0, DIGITS_CLASSES):
        raise UsageError(f"--num-classes {model.num_classes}: --data digits has {DIGITS_CLASSES}, or 0 without labels")
    shape = config.shape
    if any(side % shape.patch_size for side in shape.input_size):
        height, width = shape.input_size
        raise UsageError(f"--image-size {model.image_size} gives the model {height}x{width}, which patches of "
                         f"{shape.patch_size} do not divide")
    if shape.hidden_size % shape.num_heads or shape.hidden_size % 4:
        raise UsageError(f"--hidden-size {shape.hidden_size}: must be a multiple of 4 and of --num-heads "
                         f"{shape.num_heads}")


def _check_toggles(config: TrainConfig) -> None:
    """Refuse what could not take effect, so that no toggle is silently off."""
    memory, data, precision = config.memory, config.data, config.precision
    depth = config.shape.depth
    if memory.ckpt_blocks is not None and not memory.ckpt:
        raise UsageError(f"--ckpt-blocks {memory.ckpt_blocks} has no effect without --ckpt")
    if memory.ckpt_blocks is not None and not 1 <= memory.ckpt_blocks <= depth:
        raise UsageError(f"--ckpt-blocks {memory.ckpt_blocks}: the model has {depth} blocks")
    if memory.ckpt_every_nth > 1 and (not memory.ckpt or memory.ckpt_blocks is not None):
        raise UsageError(f"--ckpt-every-nth {memory.ckpt_every_nth} goes with --ckpt and without --ckpt-blocks")
    if memory.ckpt_every_nth > depth:
        raise UsageError(f"--ckpt-every-nth {memory.ckpt_every_nth}: the model has {depth} blocks")
    _check_devices(config)
    if precision.amp_dtype != "auto" and not precision.amp:
        raise UsageError(f"--amp-dtype {precision.amp_dtype} has no effect without --amp")
    if data.encode_chunk and not config.encodes_in_loop:
        raise UsageError(f"--encode-chunk {data.encode_chunk} has no effect: no VAE runs in the loop here")
    if data.classes_file and data.data != "folder":
        raise UsageError(f"--classes-file {data.classes_file} has no effect with --data {data.data}; it names folders")
    if data.augment != "center-crop" and data.data not in IMAGE_DATA:
        raise UsageError(f"--augment {data.augment} has no effect with --data {data.data}: no image is cropped here")
    if data.data in ("digits", "synthetic") and data.data_path:
        raise UsageError(f"--data-path {data.data_path} has no effect with --data {data.data}; use --data folder")
    if config.trial.trial and config.trial.plan == "off":
        raise UsageError("--trial holds a plan against a run; it cannot go with --plan off")


def _check_devices(config: TrainConfig) -> None:
    memory, shape, optimizer = config.memory, config.shape, config.optim.optimizer
    together = memory.tensor_parallel
    if memory.shard_size and memory.parallel != "fsdp":
        raise UsageError(f"--shard-size {memory.shard_size} has no effect without --parallel fsdp")
    if shape.num_heads % together:
        raise UsageError(f"--tensor-parallel {together}: must divide the model's {shape.num_heads} heads")
    if optimizer.endswith("bit") and (memory.parallel == "fsdp" or together > 1):
        raise UsageError(f"--optimizer {optimizer} works on whole tensors; with --parallel fsdp or --tensor-parallel "
                         "use adamw, whose moments are then sharded")
    if config.precision.compile and (memory.parallel == "fsdp" or together > 1):
        raise UsageError("--compile does not go with --parallel fsdp or --tensor-parallel")
