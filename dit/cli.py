"""What every command shares: flags over a TOML file, and a mistake reported in one line with exit code 2.

tyro is imported where flags are parsed, so that a machine without it can still use everything else.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dit.config import IMAGE_DATA, TrainConfig, UsageError, replace
from dit.config_checks import validate
from dit.config_files import load_toml


def train_config(args: Sequence[str], *, prog: str) -> TrainConfig:
    """The settings of ``train.py``'s command line: ``--config FILE`` first, flags over it, validated."""
    path, rest = take_flag(args, "--config")
    config = settle(parse_flags(TrainConfig, rest, load_toml(path) if path else TrainConfig(), prog=prog))
    if config.data.data in (*IMAGE_DATA, "latents") and not config.data.data_path:  # a plan can do without
        raise UsageError(f"--data {config.data.data} needs --data-path (or try --config configs/digits.toml)")
    return config


def settle(config: TrainConfig) -> TrainConfig:
    """Fill in what the VAE or the latents say of themselves, and validate. Raises UsageError."""
    if config.data.data == "latents" and config.data.data_path:
        from dit.latents import latents_spec

        spec = latents_spec(config.data.data_path)  # the VAE's own name goes with the run, to decode its samples
        config = replace(config, latent_channels=spec.latent_channels, latent_factor=spec.factor,
                         vae=config.data.vae or spec.name)
    elif config.vae not in ("none", "ema", "mse"):
        from dit.codec import codec_spec

        spec = codec_spec(config.vae)
        config = replace(config, latent_channels=spec.latent_channels, latent_factor=spec.factor)
    return validate(config)


def parse_flags(cls: type, args: Sequence[str], default: object | None = None, *, prog: str) -> object:
    """Parse flags into the dataclass ``cls``, starting from ``default`` or from the fields' own defaults.

    Returns an instance of ``cls``. ``--help`` prints and exits 0. Raises UsageError with tyro's message on one line.
    """
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(tyro.conf.OmitArgPrefixes[cls], args=list(args), prog=prog,
                            **({} if default is None else {"default": default}))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(said.getvalue())) from None


def take_flag(args: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Split ``--name VALUE`` or ``--name=VALUE`` off ``args``: (the last value given or None, the other arguments)."""
    values, rest = take_flags(args, name)
    return values[-1] if values else None, rest


def take_flags(args: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """As ``take_flag``, for a flag that may be given several times: (all its values, the other arguments)."""
    values, rest, words = [], [], iter(args)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{name} needs a value")
            values.append(value)
        elif word.startswith(name + "="):
            values.append(word.split("=", 1)[1])
        else:
            rest.append(word)
    return values, rest


def _one_line(box: str) -> str:
    """tyro's boxed error as one line: the message, then what was perhaps meant, without frame and help text."""
    lines = [line.strip("╭╮╰╯│─ \t") for line in box.splitlines() if line.strip("╭╮╰╯│─ \t")]
    title = lines.pop(0) if lines else ""
    message = " ".join(line for line in lines if not line.startswith("For full helptext")) or title
    meant = re.search(r"Perhaps you meant:? *(--[a-z0-9-]+)", message)
    message = re.split(r"Perhaps you meant|Got errors|Argument helptext", message)[0].strip()
    return message + (f"; did you mean {meant.group(1)}?" if meant else "")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command and exit: 0, what ``main`` returns, 2 with one line for a user's mistake, 130 after Ctrl-C."""
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
