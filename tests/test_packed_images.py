"""Images in tars and Arrow tables: the same samples as from a folder, by position, and what is refused."""
import io
import json
import pickle
import shutil
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from dit import packed_images
from dit.cli import train_config
from dit.config import TrainConfig, UsageError, replace
from dit.config_checks import validate
from dit.data import PositionDataset, build_dataset, micro_batches, sample_count, worker_rate
from dit.images import ImageData, ImageIndex
from dit.packed_images import ArrowIndex, TarIndex

SIZE = (8, 12)
PER_CLASS = 4
CLASSES = ["a", "b häuser", "c"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_CACHE", str(tmp_path / "cache"))


def png(seed):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (10, 15, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


SAMPLES = [(f"{name}/{i}", png(100 * label + i), label) for label, name in enumerate(CLASSES) for i in range(PER_CLASS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for key, image, _ in SAMPLES:
        (root / key).parent.mkdir(exist_ok=True)
        (root / f"{key}.png").write_bytes(image)
    return root


def write_tar(path, samples, format=tarfile.PAX_FORMAT):
    """Samples are (key, {suffix: bytes})."""
    with tarfile.open(path, "w", format=format) as tar:
        for key, files in samples:
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def tars(tmp_path):
    """Three tars, written in each way labels are."""
    root = tmp_path / "Archive é 漢"
    root.mkdir()
    write_tar(root / "train-0.tar", [(key, {"png": image, "cls": b"%d\n" % label})
                                     for key, image, label in SAMPLES[:5]])
    write_tar(root / "train-1.tar", [(key, {"cls": b"%d" % label, "PNG": image, "txt": b"a photograph"})
                                     for key, image, label in SAMPLES[5:9]], tarfile.GNU_FORMAT)
    write_tar(root / "train-2.tar", [(key, {"json": json.dumps({"label": label, "width": 15}).encode(), "png": image})
                                     for key, image, label in SAMPLES[9:]])
    return root


def arrow(path, labels=None, name="label", feature=None, **columns):
    import datasets
    labels = [label for _, _, label in SAMPLES] if labels is None else labels
    images = [{"bytes": image, "path": None} for _, image, _ in SAMPLES]
    features = {"image": datasets.Image(), name: feature or datasets.ClassLabel(names=CLASSES)}
    features |= {column: datasets.Value("int64") for column in columns}
    made = datasets.Dataset.from_dict({"image": images, name: labels} | columns, features=datasets.Features(features))
    made.save_to_disk(path)
    return path


def samples(index, count=48):
    return PositionDataset(ImageData(index, SIZE, augment="random-crop"), seed=0, noise_shape=(3, *SIZE)).__getitems__(
        range(count))


def assert_same_samples(index, folder):
    found, expected = samples(index), samples(ImageIndex(folder))
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_tars_give_what_the_folder_gives(tars, folder):
    index = TarIndex(str(tars))
    assert len(index) == 12 and index.class_names == ["0", "1", "2"]
    assert index.name(0) == f"{tars / 'train-0.tar'}: a/0.png" and index.name(8).endswith("train-1.tar: c/0.PNG")
    assert_same_samples(index, folder)
    assert_same_samples(TarIndex(str(tars / "train-{0..2}.tar")), folder)
    assert len(TarIndex(str(tars / "train-{1..2}.tar"))) == 7 and len(TarIndex(str(tars), max_tars=1)) == 5


def test_an_arrow_table_gives_what_the_folder_gives(tmp_path, folder):
    index = ArrowIndex(arrow(tmp_path / "hf"))
    assert index.class_names == CLASSES and index.name(3) == f"{tmp_path / 'hf'}: row 3"
    assert_same_samples(index, folder)


@pytest.mark.parametrize("kind", ["webdataset", "hf"])
def test_workers_read_them_and_a_dataset_can_be_sent(kind, tmp_path, tars, folder):
    path = tars if kind == "webdataset" else arrow(tmp_path / "hf")
    config = validate(replace(TrainConfig(), data=kind, data_path=str(path), image_size=SIZE, vae="none",
                              model="DiT-S/4", num_classes=3, num_workers=2))
    dataset = build_dataset(config)
    expected = build_dataset(replace(config, data="folder", data_path=str(folder))).__getitems__(range(12, 24))
    loader = micro_batches(dataset, start_step=1, global_batch=12, num_workers=2)
    arrived = next(loader)
    loader.close()
    for batch in (arrived, pickle.loads(pickle.dumps(dataset)).__getitems__(range(12, 24))):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert worker_rate(config, seconds=0.05) > 1 and sample_count(config) == len(dataset)
    assert not config.encodes_in_loop and replace(config, vae="ema").encodes_in_loop


def test_class_names_in_tars_are_numbered_as_python_sorts_them(tmp_path):
    write_tar(tmp_path / "0.tar", [("x", {"png": png(0), "cls": b"zebra"}), ("y", {"png": png(1), "json": b'"ant"'})])
    write_tar(tmp_path / "1.tar", [("x", {"png": png(2), "json": b'{"class": "bee", "label_text": 3}'})])
    index = TarIndex(str(tmp_path))
    assert index.class_names == ["ant", "bee", "zebra"] and index.labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(("feature", "labels"), [("int64", [3] * 11 + [1]), ("string", ["é"] * 11 + ["a"])])
def test_plain_columns_are_labels_too(tmp_path, feature, labels, caplog):
    import datasets
    index = ArrowIndex(arrow(tmp_path / "hf", labels, "cls", datasets.Value(feature)))
    assert index.labels.tolist() == ([3] * 11 + [1] if feature == "int64" else [1] * 11 + [0])
    assert index.class_names == (["0", "1", "2", "3"] if feature == "int64" else ["a", "é"])
    assert ("2 of 4 classes have no image, the first is 0" in caplog.text) == (feature == "int64")


def test_without_labels(tmp_path):
    write_tar(tmp_path / "0.tar", [("x", {"png": png(0)}), ("notes", {"txt": b"none"}), ("y", {"jpg": png(1)})])
    index = TarIndex(str(tmp_path), labelled=False)
    assert index.labels.tolist() == [0, 0] and index.class_names == []
    index = ArrowIndex(arrow(tmp_path / "hf", name="caption"), labelled=False)
    assert index.labels.tolist() == [0] * 12 and index.class_names == []


def test_a_tar_is_looked_through_once(tars, monkeypatch, tmp_path):
    first = TarIndex(str(tars))
    assert len(list((tmp_path / "cache" / "tars").iterdir())) == 3
    with monkeypatch.context() as patch:
        patch.setattr(packed_images, "_tar_samples", None)
        again = TarIndex(str(tars))
        assert np.array_equal(first.labels, again.labels) and first.image(7).read() == again.image(7).read()
    for path in (tmp_path / "cache" / "tars").iterdir():
        path.write_bytes(b"cut off")
    assert len(TarIndex(str(tars))) == 12
    write_tar(tars / "train-0.tar", [("new", {"png": png(7), "cls": b"0"})])  # another file is looked through again
    assert len(TarIndex(str(tars))) == 8
    monkeypatch.setenv("DIT_CACHE", str(tars / "train-0.tar"))  # no folder can be made there
    assert len(TarIndex(str(tars))) == 8


def test_long_names(tmp_path):
    key = "x" * 150 + "/" + "y" * 150
    write_tar(tmp_path / "0.tar", [(key, {"png": png(5), "cls": b"0"})])
    assert TarIndex(str(tmp_path)).image(0).read() == png(5)


def test_an_unreadable_image_is_replaced_and_named(tars, tmp_path):
    write_tar(tars / "train-1.tar", [("p/1", {"png": b"broken", "cls": b"1"}), ("p/2", {"png": png(2), "cls": b"1"})])
    data = ImageData(TarIndex(str(tars)), SIZE)
    assert data._first_readable(5)[1] == 6
    assert list(data.unreadable) == [f"{tars / 'train-1.tar'}: p/1.png"]
    data = ImageData(ArrowIndex(arrow(tmp_path / "hf")), SIZE)
    data.index._images = [{"image": {"bytes": b"broken", "path": None}}, {"image": None},
                          {"image": {"bytes": png(2), "path": None}}]
    assert data._first_readable(0)[1] == 2
    assert list(data.unreadable) == [f"{tmp_path / 'hf'}: row {row}" for row in (0, 1)]


def test_a_tar_that_becomes_shorter_is_named(tars):
    index = TarIndex(str(tars))
    (tars / "train-2.tar").write_bytes(b"")
    with pytest.raises(UsageError, match="--data-path .*train-2.tar has become shorter"):
        index.image(11)


def refused(function, message):
    with pytest.raises(UsageError, match=message) as caught:
        function()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "message"), [
    ("missing", r"train-3.tar is missing; give a folder of .tar files or a pattern"),
    ("no tars", "no .tar files in it; .* --data folder"), ("remote", "must be local files"),
    ("compressed", "train-0.tar is no readable, uncompressed tar file"), ("text", "train-0.tar is no readable"),
    ("cut", "train-0.tar is no readable"), ("no images", "no images in 1 tar files"),
    ("no label", "train-0.tar: x.png has no number or name in a .cls or .json"), ("bad json", "x.png has no number"),
    ("negative", "has label -1; labels are"), ("huge", "has label 123456789; labels are"),
])
def test_tars_that_cannot_be_used(tmp_path, folder, kind, message):
    path, pattern = tmp_path / "train-0.tar", str(tmp_path)
    files = {"no images": {"txt": b"x"}, "no label": {"png": png(0)}, "bad json": {"png": png(0), "json": b"{"},
             "negative": {"png": png(0), "cls": b"-1"}, "huge": {"png": png(0), "cls": b"123456789"}}
    write_tar(path, [("x", files.get(kind, {"png": png(0), "cls": b"0"}))])
    if kind == "missing":
        pattern = str(tmp_path / "train-{0..3}.tar")
        for i in (1, 2):
            shutil.copy(path, tmp_path / f"train-{i}.tar")
    elif kind == "no tars":
        pattern = str(folder)
    elif kind == "remote":
        pattern = "https://example.org/train-{0..3}.tar"
    elif kind == "compressed":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(__file__)
    elif kind == "text":
        path.write_text("hello")
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:700])
    refused(lambda: TarIndex(pattern), f"^--data-path .*{message}")


@pytest.mark.parametrize(("kind", "message"), [
    ("missing", "not a folder"), ("folder", "not a data set that save_to_disk wrote"),
    ("no image", "no image column among pixels, label; name one 'image'"),
    ("no label", "no label column among image, caption; name one 'label', or train without labels"),
    ("splits", "has splits test and no train"), ("negative", "has label -1"),
])
def test_tables_that_cannot_be_used(tmp_path, folder, kind, message):
    import datasets
    path = tmp_path / "hf"
    if kind == "folder":
        path = folder
    elif kind == "no image":
        datasets.Dataset.from_dict({"pixels": [1], "label": [0]}).save_to_disk(path)
    elif kind == "no label":
        arrow(path, name="caption", feature=datasets.Value("int64"))
    elif kind == "splits":
        datasets.DatasetDict(test=datasets.Dataset.from_dict({"a": [1]})).save_to_disk(path)
    elif kind == "negative":
        arrow(path, [0] * 11 + [-1], feature=datasets.Value("int64"))
    refused(lambda: ArrowIndex(path), f"^--data-path .*{message}")


def test_the_train_split_is_taken(tmp_path):
    import datasets
    arrow(tmp_path / "one")
    train = datasets.load_from_disk(tmp_path / "one")
    datasets.DatasetDict(test=train.select([0]), train=train).save_to_disk(tmp_path / "both")
    assert len(ArrowIndex(tmp_path / "both")) == 12
    assert len(ArrowIndex(tmp_path / "both" / "test")) == 1


@pytest.mark.parametrize(("library", "kind"), [("webdataset", "webdataset"), ("datasets", "hf")])
def test_a_missing_library_is_one_line(library, kind, tmp_path, tars, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    index = {"webdataset": TarIndex, "hf": ArrowIndex}[kind]
    refused(lambda: index(str(tars)), f"^--data {kind}: {library} is not installed; pip install {library}$")


@pytest.mark.parametrize(("flags", "message"), [
    (["--data", "webdataset"], "--data webdataset needs --data-path"),
    (["--data", "hf"], "--data hf needs --data-path"),
    (["--data", "hf", "--data-path", "x", "--classes-file", "y"], "--classes-file y has no effect with --data hf"),
    (["--data", "latents", "--data-path", "x", "--augment", "resize"], "--data-path x: not a folder"),
    (["--data", "synthetic", "--augment", "resize"], "--augment resize has no effect with --data synthetic"),
])
def test_settings(flags, message):
    refused(lambda: train_config(flags, prog="train.py"), message)
