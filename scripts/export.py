"""Export a checkpoint as one file: the averaged weights alone, or everything in a folder that many processes wrote."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dit.cli import parse_flags, run
from dit.config import UsageError


@dataclass(frozen=True)
class ExportConfig:
    """Write weights as one file: bare, with the official names, as the released DiT weights are; or everything."""

    ckpt: str
    """The checkpoint: a .pt file, or a .sharded folder of a run with --parallel fsdp or --tensor-parallel."""
    output: str
    """The file to write, .pt or .safetensors."""
    weights: Literal["ema", "model", "all"] = "ema"
    """ema or model: these weights alone. all: everything, a .pt file from which a run goes on and which samples."""


def main(args: list[str]) -> int:
    config = parse_flags(ExportConfig, args, prog="export.py")
    output = Path(config.output)
    if output.suffix not in (".pt", ".safetensors"):
        raise UsageError(f"--output {output}: must end in .pt or .safetensors")
    if config.weights == "all" and output.suffix != ".pt":
        raise UsageError(f"--output {output}: a safetensors file holds tensors only; --weights all needs .pt")

    from dit import checkpoint

    state = checkpoint.load(config.ckpt)
    if config.weights == "all":
        content = {"format": checkpoint.FORMAT, **state}
    else:
        content = {name: tensor.contiguous() for name, tensor in
                   checkpoint.weights(state, config.weights, config.ckpt).items()}
    write(output, content, metadata(state))
    print(f"{output}: {what(config.weights)} of step {state.get('step', 'unknown')}, "
          f"{output.stat().st_size / 2**20:,.1f} MiB")
    if config.weights != "all" and output.suffix == ".pt" and hides_shape(state, content):
        print(f"note: the number of heads ({state['shape']['num_heads']}) cannot be seen in bare weights of this "
              "custom model; --weights all keeps it")
    return 0


def what(weights: str) -> str:
    return {"ema": "averaged weights", "model": "weights", "all": "everything"}[weights]


def metadata(state: dict) -> dict[str, str]:
    """What a safetensors file says beside its tensors: the model's shape and the step, as JSON."""
    import json

    return {name: json.dumps(state[name]) for name in ("shape", "step") if name in state}


def hides_shape(state: dict, tensors: dict) -> bool:
    """Whether someone who reads the bare tensors would build another model."""
    from dit import checkpoint

    return "shape" in state and checkpoint.shape_of({}, tensors).num_heads != state["shape"]["num_heads"]


def write(path: Path, content: dict, about: dict[str, str]) -> None:
    """Write a file beside ``path`` and rename it into place. Raises UsageError where that fails."""
    import torch

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {path}: could not be written ({error.strerror})") from None
    try:
        if path.suffix == ".pt":
            torch.save(content, temporary)
        else:
            from safetensors.torch import save_file

            save_file(content, temporary, metadata=about)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(f"--output {path}: could not be written ({reason})") from None
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
