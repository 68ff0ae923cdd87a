"""Checkpoint files: whole or not there, checked before they are trusted, bounded in number, readable without pickle."""

import os
import random
import stat

import pytest
import torch
from faultlog import record
from torch import nn

from dit import checkpoint
from dit.config import UsageError, replace
from dit.config_files import load_toml
from dit.model import build_model
from dit.optim import build_optimizer
from dit.saving import HostCopies, named_tensors

TENSORS = {"weight": torch.arange(3000.0), "bias": torch.ones(7)}


def state(step=1):
    return {"model": dict(TENSORS), "step": step, "config": {"run": {"max_steps": 5}}}


@pytest.fixture
def saved(tmp_path):
    path = checkpoint.path_of(tmp_path, 1)
    checkpoint.save(path, state())
    return path


def test_a_file_holds_what_was_saved_and_needs_no_pickle(saved):
    found = checkpoint.load(saved)
    assert found["step"] == 1 and found["format"] == checkpoint.FORMAT and found["config"] == {"run": {"max_steps": 5}}
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in TENSORS.items())
    assert torch.load(saved, weights_only=True)["step"] == 1


def test_a_file_can_be_read_by_whom_the_user_lets(saved):
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_named_and_the_one_before_is_used(tmp_path, saved, keep):
    newest = checkpoint.path_of(tmp_path, 2)
    checkpoint.save(newest, state(2))
    os.truncate(newest, int(keep * newest.stat().st_size))
    path, skipped = checkpoint.newest_valid(tmp_path)
    assert path == saved and len(skipped) == 1
    assert skipped[0].startswith(f"skipped {newest}: truncated or not a checkpoint file")
    with pytest.raises(UsageError, match="truncated or not a checkpoint file"):
        checkpoint.load(newest)
    record("newest file truncated", f"to {100 * keep:.0f} % of its bytes", after="named, the file before it is used")


def test_a_record_that_calls_itself_encrypted_is_altered(saved):
    data = bytearray(saved.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag of the first record in the archive's directory
    saved.write_bytes(data)
    assert "not a checkpoint file" in checkpoint.defect(saved)


def test_a_flipped_bit_is_found_or_changes_nothing(saved):
    """Some bytes of the container are padding; wherever a bit flips, no other numbers are ever loaded."""
    whole, choose, found = saved.read_bytes(), random.Random(0), 0
    reference = dict(named_tensors(checkpoint.load(saved)))
    for _ in range(200):
        data = bytearray(whole)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        saved.unlink()  # loaded tensors may still be mapped to the old file
        saved.write_bytes(data)
        try:
            tensors = dict(named_tensors(checkpoint.load(saved)))
        except UsageError:
            found += 1
            continue
        assert tensors.keys() == reference.keys()
        assert all(torch.equal(tensors[name], reference[name]) for name in reference)
    assert found > 180
    record("newest file altered", "one bit, anywhere", times=200, after="refused, or it was padding: no other numbers")


def test_every_bit_of_the_weights_is_under_the_checksum(saved):
    data = bytearray(saved.read_bytes())
    at = data.index(torch.arange(3000.0).numpy().tobytes()) + 5000
    data[at] ^= 1
    saved.write_bytes(data)
    assert checkpoint.defect(saved).startswith("altered: record ") and "fails its checksum" in checkpoint.defect(saved)


def test_what_is_not_a_checkpoint_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        checkpoint.load(tmp_path / "nothing.pt")
    with pytest.raises(UsageError, match="is a folder; name one of its .pt files"):
        checkpoint.load(tmp_path)
    torch.save({"something": 1}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="neither model nor ema in it"):
        checkpoint.load(tmp_path / "other.pt")
    torch.save({"model": build_model}, tmp_path / "code.pt")
    with pytest.raises(UsageError, match="not a checkpoint file of this project"):
        checkpoint.load(tmp_path / "code.pt")


@pytest.mark.parametrize(("keep_last", "keep_every", "left"), [
    (2, 0, [25, 30]), (2, 10, [10, 20, 25, 30]), (1, 0, [30]), (0, 0, [5, 10, 15, 20, 25, 30])])
def test_old_files_are_deleted_and_left_overs_of_a_killed_save(tmp_path, keep_last, keep_every, left):
    for step in range(5, 35, 5):
        checkpoint.save(checkpoint.path_of(tmp_path, step), state(step))
    (tmp_path / ".0000035.pt.4711").write_bytes(b"half")
    checkpoint.prune(tmp_path, 30, keep_last, keep_every)
    assert checkpoint.steps_in(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)


def test_a_broken_file_of_later_steps_never_costs_a_whole_one(tmp_path):
    """A run resumed at step 20, because the file of step 30 is broken, must not count that one among those it keeps."""
    for step in (20, 25):
        checkpoint.save(checkpoint.path_of(tmp_path, step), state(step))
    checkpoint.path_of(tmp_path, 30).write_bytes(b"broken")
    checkpoint.prune(tmp_path, 25, 1, 0)
    assert checkpoint.newest_valid(tmp_path)[0] == checkpoint.path_of(tmp_path, 25)


def test_what_is_in_place_stays_when_a_save_fails(tmp_path, saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match=r"could not write .*0000001.pt: No space left on device; earlier files are"):
        checkpoint.save(saved, state(9))
    assert saved.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["0000001.pt"]


def test_the_planned_bytes_are_those_of_the_file(tmp_path):
    shared = torch.zeros(250_000)
    content = {"model": {"a": shared, "b": torch.zeros(1_000_000)}, "ema": {"a": shared}}
    path = tmp_path / "0000001.pt"
    checkpoint.save(path, content)
    planned = checkpoint.bytes_of(tensor for _, tensor in named_tensors(content))
    assert planned == 5_000_000 and planned < path.stat().st_size < 1.01 * planned


def test_a_file_of_another_model_is_refused_with_the_first_difference():
    config = load_toml("configs/tiny.toml")
    model, other = (build_model(shape) for shape in (config.shape, replace(config, hidden_size=32).shape))
    with pytest.raises(UsageError, match=r"file.pt: blocks.0.adaLN_modulation.1.bias is \(192,\) in the file and "
                                         r"\(384,\) in the model"):
        checkpoint.load_weights(model, other.state_dict(), "file.pt")
    fewer = {name: tensor for name, tensor in model.state_dict().items() if name != "pos_embed"}
    with pytest.raises(UsageError, match="pos_embed is nothing in the file and"):
        checkpoint.load_weights(model, fewer, "file.pt")


def test_an_optimizer_keeps_its_memory_when_it_is_loaded():
    config, layer = load_toml("configs/tiny.toml").optim, nn.Linear(3, 2)
    one, other = (build_optimizer(config, layer.parameters()) for _ in range(2))
    layer(torch.ones(1, 3)).sum().backward()
    one.step()
    places = [tensor.data_ptr() for _, tensor in named_tensors(other.state_dict()["state"])]
    checkpoint.load_optimizer(other, one.state_dict())
    assert [tensor.data_ptr() for _, tensor in named_tensors(other.state_dict()["state"])] == places
    for (_, a), (_, b) in zip(named_tensors(one.state_dict()["state"]), named_tensors(other.state_dict()["state"])):
        assert torch.equal(a, b)


def test_copies_for_a_save_share_what_is_shared_and_nothing_with_the_originals():
    tensor = torch.ones(4)
    state = {"model": {"a": tensor}, "ema": {"a": tensor}, "betas": (0.9, 1)}
    copies, ready = HostCopies(torch.device("cpu")).take(state)
    ready()
    tensor.zero_()
    assert copies["betas"] == (0.9, 1) and copies["model"]["a"] is copies["ema"]["a"]
    assert torch.equal(copies["model"]["a"], torch.ones(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_a_gpu_are_those_of_the_moment_and_pinned():
    """The update that follows waits on the device; memory of the copies is used again."""
    copies = HostCopies(torch.device("cuda", 0))
    tensor = torch.ones(2**24, device="cuda")
    places = set()
    for expected in (1.0, 2.0):
        found, ready = copies.take({"a": tensor})
        copies.hold_update()
        tensor.add_(1.0)
        ready()
        assert found["a"].is_pinned() and torch.equal(found["a"], torch.full((2**24,), expected))
        places.add(found["a"].data_ptr())
    assert len(places) == 1
