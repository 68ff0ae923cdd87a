"""Tensor parallelism: equal to one process, with and without FSDP; on disk nothing shows of it."""

import json
import shutil
from pathlib import Path

import pytest
import runs
import torch
import torch.distributed.checkpoint  # noqa: F401 - before ranks fork
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401
from forked import run_ranks
from runs import ONE, TINY

from dit import checkpoint, preview, trainer
from dit.config import UsageError, replace
from dit.config_files import load_toml
from dit.local_shards import local
from dit.metrics import DeviceFacts
from dit.run_folder import open_run

ROOT = Path(__file__).parent.parent
pytestmark = runs.needs_fsdp


def bytes_of_blocks(ranks, config):
    parts = runs.build(ranks, config)
    attention = parts.model.blocks[0].attn
    return sum(local(parameter).nbytes for parameter in parts.model.blocks.parameters()), attention.num_heads


def come_to(ranks, *configs):
    """What each of several runs comes to, and this rank's share of the model."""
    return [(runs.run(ranks, config), *bytes_of_blocks(ranks, config)) for config in configs]


BF16 = {"amp": True, "amp_dtype": "bf16", "ckpt": True, "grad_accum": 2, "attention": "math", "ema": "host"}


def test_two_devices_together_equal_one_and_hold_half_of_the_blocks(tmp_path):
    single, low = TINY, replace(TINY, **BF16)
    (alone, whole, heads), (alone_low, _, _) = come_to(ONE, single, low)
    spread = [replace(config, tensor_parallel=2) for config in (single, low)]
    for (together, share, own_heads), (together_low, _, _) in run_ranks(2, come_to, *spread, folder=tmp_path):
        runs.assert_alike(alone, together)
        runs.assert_alike(alone_low, together_low, within=2e-3)  # bf16 sums in another order
        assert own_heads == heads // 2 and share < 0.51 * whole  # biases of the second Linear of a pair are whole


def test_two_groups_of_two_equal_one(tmp_path):
    config = replace(TINY, ckpt=True, grad_accum=2)
    alone, whole, _ = come_to(ONE, config)[0]
    ddp, fsdp = (replace(config, parallel=parallel, tensor_parallel=2) for parallel in ("ddp", "fsdp"))
    for (copies, half, _), (shards, quarter, _) in run_ranks(4, come_to, ddp, fsdp, folder=tmp_path):
        runs.assert_alike(alone, copies)
        runs.assert_alike(alone, shards)
        assert half < 0.51 * whole and quarter < 0.26 * whole


DIGITS = replace(load_toml(ROOT / "configs" / "tiny.toml"), ckpt_every=4, log_every=8)


@pytest.fixture(autouse=True)
def leave_out_what_takes_long(monkeypatch):
    monkeypatch.setattr(trainer, "WATCHED_STEPS", 0)
    monkeypatch.setattr(preview, "GRID_STEPS", 2)


def train_to(ranks, config, folder, steps):
    config = replace(config, run_dir=str(folder), max_steps=steps)
    trainer.train(config, open_run(config, ranks), ranks, DeviceFacts(), lambda line: None)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_another_split_and_its_files_are_official(tmp_path):
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    train_to(ONE, DIGITS, alone, 6)
    run_ranks(2, train_to, replace(DIGITS, tensor_parallel=2, sample_every=3), spread, 4, folder=tmp_path)
    half = checkpoint.load(spread / "checkpoints" / "0000004.sharded")
    expected = checkpoint.load(alone / "checkpoints" / "0000004.pt")
    assert {name: tensor.shape for name, tensor in half["model"].items()} == {
        name: tensor.shape for name, tensor in expected["model"].items()}
    for name in ("model", "ema"):
        assert runs.distance(expected[name], half[name]) < 1e-5
    for index, moments in expected["opt"]["state"].items():
        assert runs.distance(moments, half["opt"]["state"][index]) < 1e-5
    assert half["opt"]["param_groups"][0]["params"] == expected["opt"]["param_groups"][0]["params"]
    shutil.copytree(spread, tmp_path / "one")
    train_to(ONE, DIGITS, tmp_path / "one", 6)
    run_ranks(4, train_to, replace(DIGITS, tensor_parallel=2, parallel="fsdp"), spread, 6, folder=tmp_path)
    for folder in (tmp_path / "one", spread):
        assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
        found = checkpoint.load(checkpoint.newest_valid(folder / "checkpoints")[0])
        assert runs.distance(checkpoint.load(alone / "checkpoints" / "0000006.pt")["model"], found["model"]) < 1e-5


def test_one_device_cannot_compute_together():
    with pytest.raises(UsageError, match="--tensor-parallel 2 does not divide 1 devices; start a multiple of 2"):
        replace(TINY, tensor_parallel=2).micro_batch(1)
