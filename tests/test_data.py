"""Micro-batches are functions of (seed, position): whatever the split over ranks, accumulation, workers and resumes."""
import importlib.util
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dit.config import TrainConfig, UsageError, replace
from dit.data import (
    DigitsData,
    LoaderError,
    PositionDataset,
    SyntheticData,
    build_dataset,
    measured_rate,
    micro_batches,
    position_ranges,
)
from dit.parallel import Ranks
from dit.planner import known_samples, measured_loader_rate, plan
from dit.planner.hardware import find_device
from dit.run_folder import RunFolder
from dit.trial import freeze_plan

LATENT = (4, 8, 8)


def synthetic(**kw):
    return PositionDataset(SyntheticData(LATENT, num_classes=10, num_samples=50), seed=1, noise_shape=LATENT, **kw)


def joined(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def test_shapes_and_types():
    batch = synthetic(needs_posterior_noise=True).__getitems__(range(5))
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "x": ((5, *LATENT), torch.float32), "y": ((5,), torch.int64), "t": ((5,), torch.int64),
        "drop": ((5,), torch.bool), "noise": ((5, *LATENT), torch.float32),
        "posterior_noise": ((5, *LATENT), torch.float32),
    }
    assert "posterior_noise" not in synthetic().__getitems__(range(5))
    assert not torch.equal(batch["noise"], batch["posterior_noise"])


def test_one_at_a_time_equals_many_at_once():
    dataset = synthetic(needs_posterior_noise=True)
    many = dataset.__getitems__(range(37))
    assert_same(many, joined([dataset.__getitems__([position]) for position in range(37)]))
    assert_same({k: v[9] for k, v in many.items()}, dataset[9])


@pytest.mark.parametrize(("world", "accumulation", "workers"), [(1, 1, 0), (2, 1, 0), (1, 4, 1), (2, 2, 2), (4, 3, 0)])
def test_the_global_batch_does_not_depend_on_the_split(world, accumulation, workers):
    dataset = synthetic()
    loaders = [micro_batches(dataset, start_step=3, global_batch=24, accumulation=accumulation, rank=rank,
                             world_size=world, num_workers=workers) for rank in range(world)]
    for step in (3, 4, 5):
        batch = joined([next(loader) for _ in range(accumulation) for loader in loaders])
        assert_same(batch, dataset.__getitems__(range(step * 24, step * 24 + 24)))
    for loader in loaders:
        loader.close()


def test_position_arithmetic():
    ranges = position_ranges(start_step=2, global_batch=8, accumulation=2, rank=1, world_size=2)
    assert list(itertools.islice(ranges, 3)) == [range(18, 20), range(22, 24), range(26, 28)]


def test_resume_gives_what_an_uninterrupted_run_sees():
    dataset = synthetic()
    straight = micro_batches(dataset, start_step=0, global_batch=6)
    for _ in range(7):
        next(straight)
    resumed = micro_batches(dataset, start_step=7, global_batch=6)
    assert_same(next(straight), next(resumed))


def test_far_positions_open_at_once():
    dataset = PositionDataset(SyntheticData(LATENT, num_samples=14_000_000), seed=0, noise_shape=LATENT)
    start = time.perf_counter()
    next(micro_batches(dataset, start_step=10_000_000, global_batch=64))
    assert time.perf_counter() - start < 1.0


def test_an_epoch_shows_every_sample_once():
    batch = synthetic().__getitems__(range(50))
    assert len(torch.unique(batch["x"].flatten(1), dim=0)) == 50
    assert torch.bincount(batch["y"]).tolist() == [5] * 10


def test_seed_changes_everything():
    a = synthetic().__getitems__(range(50))
    other = PositionDataset(SyntheticData(LATENT, num_classes=10, num_samples=50), seed=2, noise_shape=LATENT)
    b = other.__getitems__(range(50))
    assert all(not torch.equal(a[name], b[name]) for name in a)


def test_digits():
    source = DigitsData()
    batch = PositionDataset(source, seed=0, noise_shape=(1, 8, 8)).__getitems__(range(1797))
    assert source.num_samples == 1797 and source.num_classes == 10 and source.class_names[3] == "3"
    assert batch["x"].min() == -1 and batch["x"].max() == 1 and batch["x"].shape == (1797, 1, 8, 8)
    from sklearn.datasets import load_digits
    digits = load_digits()
    image = torch.from_numpy(digits.images[0]).float() / 8 - 1  # found unmirrored, with its own label
    hit = (batch["x"][:, 0] == image).all(dim=(1, 2)).nonzero().flatten()
    assert len(hit) == 1 and batch["y"][hit].item() == digits.target[0]


def test_synthetic_is_unit_normal_and_a_function_of_the_index():
    source = SyntheticData((4, 32, 32), num_classes=3, num_samples=1000)
    x, y = source.read(np.arange(1000), None)
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    again, label = source.read(np.array([123]), None)
    assert np.array_equal(x[123], again[0]) and label[0] == y[123] == 0
    assert SyntheticData(LATENT, num_classes=0).read(np.arange(3), None)[1].tolist() == [0, 0, 0]


def test_labels_outside_are_refused_on_the_host():
    with pytest.raises(UsageError, match="--num-classes 5: the data has 10 classes"):
        PositionDataset(DigitsData(), seed=0, noise_shape=(1, 8, 8), num_classes=5)
    source = SyntheticData(LATENT, num_classes=10, num_samples=50)
    dataset = PositionDataset(source, seed=0, noise_shape=LATENT)
    source.num_classes = 20  # a source that does not keep what it said
    with pytest.raises(UsageError, match=r"labels must be in \[0, 10\)"):
        dataset.__getitems__(range(50))


def test_unconditional_has_one_label():
    dataset = PositionDataset(DigitsData(), seed=0, noise_shape=(1, 8, 8), num_classes=0, class_dropout_prob=0.0)
    batch = dataset.__getitems__(range(64))
    assert not batch["y"].any() and not batch["drop"].any()


class BrokenData(SyntheticData):
    def read(self, indices, scalars, posterior_noise=None):
        if 7 in indices:
            raise self.error
        return super().read(indices, scalars)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("error", "raised", "message"), [
    (UsageError("--data-path X: bad"), UsageError, "^--data-path X: bad$"),
    (KeyError("k"), LoaderError, r"^loader failed at positions \d+ to \d+: KeyError: 'k'$"),
])
def test_failures_are_one_line(workers, error, raised, message):
    source = BrokenData(LATENT, num_classes=10, num_samples=50)
    source.error = error
    dataset = PositionDataset(source, seed=0, noise_shape=LATENT)
    loader = micro_batches(dataset, start_step=0, global_batch=10, num_workers=workers)
    with pytest.raises(raised, match=message) as caught:
        for _ in range(5):
            next(loader)
    assert "\n" not in str(caught.value)
    loader.close()


class DyingData(SyntheticData):
    def read(self, indices, scalars, posterior_noise=None):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_line():
    dataset = PositionDataset(DyingData(LATENT, num_samples=50), seed=0, noise_shape=LATENT)
    loader = micro_batches(dataset, start_step=0, global_batch=10, num_workers=1)
    with pytest.raises(LoaderError, match="a loader worker ended .*--num-workers") as caught:
        next(loader)
    assert "\n" not in str(caught.value)
    loader.close()


def test_rate_is_measured():
    start = time.perf_counter()
    rate = measured_rate(synthetic(), 8, seconds=0.1)
    assert 0.1 <= time.perf_counter() - start < 5 and rate > 10


def test_a_dataset_can_be_sent_to_spawned_workers():
    dataset = synthetic(needs_posterior_noise=True)
    assert_same(pickle.loads(pickle.dumps(dataset)).__getitems__(range(9)), dataset.__getitems__(range(9)))


def test_workers_survive_the_signals_of_a_job_that_saves():
    """Ctrl-C and a scheduler's SIGTERM reach the whole job; the trainer still needs the rest of its step."""
    loader = micro_batches(synthetic(), start_step=0, global_batch=10, num_workers=1)
    next(loader)
    worker = multiprocessing.active_children()[-1]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    time.sleep(0.2)
    for _ in range(4):
        next(loader)
    loader.close()
    worker.join(timeout=10)
    assert not worker.is_alive()


class ThreadCount(SyntheticData):
    def read(self, indices, scalars, posterior_noise=None):
        x, y = super().read(indices, scalars)
        return x, np.full_like(y, torch.get_num_threads())


def test_workers_have_one_thread():
    dataset = PositionDataset(ThreadCount(LATENT, num_samples=50), seed=0, noise_shape=LATENT)
    loader = micro_batches(dataset, start_step=0, global_batch=4, num_workers=1)
    assert next(loader)["y"].tolist() == [1] * 4
    loader.close()


# ---- what the run and its plan say of the data ----

def image_folder(root, names=("a", "b", "c")):
    for name in names:
        (root / name).mkdir(parents=True)
        Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(root / name / "0.png")
    return root


def folder_config(path, **changes):
    return replace(TrainConfig(), **dict(data="folder", data_path=str(path), image_size=16, vae="none", num_classes=3,
                                         model="DiT-S/4", global_batch_size=4) | changes)


def test_fewer_classes_than_the_model_has_are_said(tmp_path):
    config = folder_config(image_folder(tmp_path / "images"))
    assert build_dataset(config).notes == [] and build_dataset(replace(config, num_classes=0)).notes == []
    assert build_dataset(replace(config, num_classes=10)).notes == [
        "the data has 3 classes and --num-classes is 10: the others are never trained"]


@pytest.mark.parametrize(("rate", "words"), [
    (0.5, "--num-workers 2 is too few: give --num-workers"), (1e9, "1 worker needed, --num-workers 2 is enough"),
])
def test_the_plan_says_how_many_workers_are_needed(rate, words):
    device = find_device("A100-80GB")
    config = folder_config("images", num_workers=2)
    planned, free = (plan(config, device, loader_rate=each).to_dict() for each in (rate, None))
    assert words in planned["notes"][-1] and not any("worker" in note for note in free["notes"])
    assert (planned["time"]["bound_by"] == "data loading") == (rate == 0.5)
    if rate == 0.5:  # four images from two workers that make one in two seconds each
        assert planned["time"]["step_seconds"]["mid"] == pytest.approx(4.0, rel=0.05)
    else:
        assert planned["time"]["step_seconds"] == free["time"]["step_seconds"]


def test_a_workers_rate_is_measured_where_the_data_is(tmp_path):
    config = folder_config(image_folder(tmp_path / "images"))
    for labelled in (3, 0):
        assert measured_loader_rate(replace(config, num_classes=labelled)) > 1
    for changes in ({"data_path": None}, {"data_path": str(tmp_path / "missing")}, {"data": "digits"},
                    {"data": "webdataset", "data_path": str(tmp_path / "missing" / "{0..3}.tar")}):
        assert measured_loader_rate(replace(config, **changes)) is None


@pytest.fixture
def plan_script(monkeypatch):
    spec = importlib.util.spec_from_file_location("plan_script", Path(__file__).parents[1] / "scripts" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # tyro looks for the source of its flags' descriptions
    spec.loader.exec_module(module)
    return module


def test_the_length_of_a_run_is_that_of_the_images_that_are_here(tmp_path, capsys, plan_script):
    root = image_folder(tmp_path / "images")
    for path in ("a/1.jpg", "b/deeper/1.png", "b/.hidden.png", "c/notes.txt", ".hidden/0.png"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(b"")
    (tmp_path / "classes").write_text("b\na\n")
    config = folder_config(root, epochs=100)
    for changes, count in (({}, 5), ({"num_classes": 0}, 5), ({"classes_file": str(tmp_path / "classes")}, 4)):
        now = replace(config, **changes)
        assert known_samples(now) == len(build_dataset(now)) == count
    assert known_samples(replace(config, max_steps=7)) is None, "nothing is counted for nothing"

    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    frozen = freeze_plan(replace(config, trial=True), RunFolder(tmp_path), ranks).content
    flags = ["--data", "folder", "--data-path", str(root), "--vae", "none", "--image-size", "16", "--num-classes", "3",
             "--model", "DiT-S/4", "--global-batch-size", "4", "--epochs", "100", "--json"]
    printed = []
    for more in ([], ["--compare", "", "--lr 1e-3"], ["--data-path", str(tmp_path / "gone")], ["--num-samples", "40"]):
        assert plan_script.main([*flags, *more]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    here, compared, missing, said = printed
    assert [each["run"]["steps"] for each in (frozen, here, *compared.values(), said)] == [125, 125, 125, 125, 1000]
    assert missing["run"]["steps"] == 100 * 1_281_167 // 4
    assert ["ImageNet" in " ".join(each["notes"]) for each in (frozen, here, said, missing)] == [False] * 3 + [True]


def test_class_names_are_kept_with_the_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.keep_classes(["a", "b é"])
    folder.keep_classes(["a", "b é"])
    for names, words in ((["a", "aa", "b é"], "class 'aa' is new"), (["a"], "class 'b é' is missing"),
                         (["b é", "a"], "the order of the classes has changed")):
        with pytest.raises(UsageError, match=f"--data-path: {words} since this run was started") as caught:
            folder.keep_classes(names)
        assert "\n" not in str(caught.value)
    folder.keep_classes(["a"], anyway=True)
    folder.keep_classes(["a"])


def test_a_failing_loader_ends_the_run_with_one_line_and_its_own_code(tmp_path, monkeypatch, capsys):
    import train

    def read(self, indices, scalars, posterior_noise=None):
        raise KeyError("k")

    monkeypatch.setattr(DigitsData, "read", read)
    flags = ["--config", "configs/digits.toml", "--run-dir", str(tmp_path), "--plan", "off", "--num-workers", "0"]
    assert train.main(flags) == LoaderError.exit_code == 6
    assert "\nstopped: loader failed at positions 0 to " in capsys.readouterr().out
