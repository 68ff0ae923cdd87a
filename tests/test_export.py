"""scripts/export.py: one file of what many processes wrote, bare weights in the official format, one-line mistakes."""

import importlib.util
from pathlib import Path

import pytest
import runs
import torch
import torch.distributed.checkpoint  # noqa: F401 - before ranks fork
import torch.distributed.fsdp  # noqa: F401
from forked import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file

from dit import checkpoint
from dit.config import UsageError, replace
from dit.config_files import to_tree
from dit.saving import state_of
from dit.sharded_checkpoint import live_pieces, write

ROOT = Path(__file__).parent.parent
CONFIG = replace(runs.TINY, hidden_size=128, num_heads=2)  # 64 wide heads, as an official file is taken to have


def load_script():
    spec = importlib.util.spec_from_file_location("export", ROOT / "scripts" / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


main = load_script().main


def save_together(ranks, folder):
    """A sharded folder of step 3, and what of it every process would see."""
    config = replace(CONFIG, parallel="fsdp")
    parts = runs.build(ranks, config)
    result = runs.run(ranks, config, 3, parts=parts)
    named = dict(parts.model.named_parameters())
    plain = {"format": 1, "step": 3, "config": to_tree(config), "shape": checkpoint.shape_tree(config.shape),
             "names": list(named), "scaler": {}, "opt_groups": parts.optimizer.state_dict()["param_groups"],
             "opt_steps": {name: parts.optimizer.state[parameter]["step"] for name, parameter in named.items()
                           if parameter.requires_grad}}
    write(folder, live_pieces(parts.model, parts.optimizer, parts.ema.state_dict()), plain, ranks.control)
    return result


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    if runs.needs_fsdp.args[0]:
        pytest.skip(runs.needs_fsdp.kwargs["reason"])
    folder = tmp_path_factory.mktemp("export")
    results = run_ranks(2, save_together, folder / "0000003.sharded", folder=folder)
    return folder / "0000003.sharded", results[0]


def test_a_sharded_folder_becomes_one_file_with_everything(sharded, tmp_path, capsys):
    folder, result = sharded
    output = tmp_path / "whole" / "all.pt"
    assert main(["--ckpt", str(folder), "--output", str(output), "--weights", "all"]) == 0
    state = torch.load(output, weights_only=True)
    assert state["step"] == 3 and state["model"].keys() == result.weights.keys()
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in result.weights.items())
    assert all(torch.equal(state["ema"][name], tensor) for name, tensor in result.averages.items())
    assert "everything of step 3" in capsys.readouterr().out
    alone = runs.build(runs.ONE, CONFIG)
    checkpoint.load_weights(alone.model, state["model"], "all.pt")
    checkpoint.load_optimizer(alone.optimizer, state["opt"])
    moments = alone.optimizer.state[alone.model.blocks[0].attn.qkv.weight]
    assert moments["step"] == 3 and moments["exp_avg_sq"].max() > 0


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_bare_weights_are_as_the_official_ones(sharded, tmp_path, suffix):
    folder, result = sharded
    output = tmp_path / f"ema{suffix}"
    assert main(["--ckpt", str(folder), "--output", str(output)]) == 0
    tensors = torch.load(output, weights_only=True) if suffix == ".pt" else load_file(output)
    expected = {**result.weights, **result.averages}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    if suffix == ".pt":
        state = checkpoint.load(output)
        assert checkpoint.shape_of(state, state["ema"]).num_heads == 2
    else:
        with safe_open(output, "pt") as file:
            assert '"num_heads": 2' in file.metadata()["shape"] and file.metadata()["step"] == "3"


def test_a_file_of_one_process_is_exported_too_and_a_hidden_shape_is_told(tmp_path, capsys):
    config = replace(runs.TINY, num_heads=4)
    parts = runs.build(runs.ONE, config)
    checkpoint.save(tmp_path / "0000001.pt", state_of(config, parts, 1))
    assert main(["--ckpt", str(tmp_path / "0000001.pt"), "--output", str(tmp_path / "w.pt"), "--weights", "model"]) == 0
    told = capsys.readouterr().out
    assert "weights of step 1" in told and "heads (4) cannot be seen" in told
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == parts.model.state_dict().keys()


def test_an_official_bare_file_passes_through(sharded, tmp_path):
    first, second = tmp_path / "a.pt", tmp_path / "b.safetensors"
    main(["--ckpt", str(sharded[0]), "--output", str(first)])
    assert main(["--ckpt", str(first), "--output", str(second)]) == 0
    assert load_file(second).keys() == torch.load(first, weights_only=True).keys()


@pytest.mark.parametrize(("args", "words"), [
    (["--output", "x.bin"], "--output x.bin: must end in .pt or .safetensors"),
    (["--output", "x.safetensors", "--weights", "all"], "--weights all needs .pt"),
    (["--output", "/dev/null/x.pt"], "--output /dev/null/x.pt: could not be written"),
])
def test_mistakes_are_one_line(sharded, args, words):
    with pytest.raises(UsageError, match=words) as refused:
        main(["--ckpt", str(sharded[0]), *args])
    assert "\n" not in str(refused.value)


def test_a_missing_or_foreign_checkpoint_is_named(tmp_path):
    for name, words in (("none.pt", "no such file"), (".", "is a folder")):
        with pytest.raises(UsageError, match=words):
            main(["--ckpt", str(tmp_path / name), "--output", str(tmp_path / "x.pt")])
