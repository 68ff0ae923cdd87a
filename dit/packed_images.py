"""Images that are not files of their own: in tar files (WebDataset) or in Arrow tables (Hugging Face datasets).

Both are read by position, like an image folder: of every tar the places of its images and their labels are looked up
once and kept in the cache folder, so that a read is one seek; an Arrow table has random access by itself. The libraries
webdataset and datasets are imported where they are used.
"""
from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from dit.cache_folder import cache_folder
from dit.config import UsageError
from dit.open_files import OpenFiles

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2", "avif", "img",
                  "image")
LABEL_SUFFIXES = ("cls", "json")
LABEL_NAMES = ("label", "labels", "cls", "class")
_INDEX_FORMAT = 1
_NO_LABEL = ""
_MAX_CLASSES = 1_000_000  # more are no class numbers but something else


class TarIndex:
    """Images and labels of WebDataset tars, like `images.ImageIndex`: flat arrays that forked workers share.

    `pattern` is a folder of tars or braces such as "train-{000..146}.tar". A sample is an image and a label, `key.jpg`
    (or png, webp, ...) and `key.cls` or `key.json`, which is a number or a class name, in JSON under "label", "cls" or
    "class". With `labelled=False` labels are not needed and all are 0. `max_tars` (0: all) opens the first ones only.

    Raises UsageError for a missing library, missing, broken, compressed or imageless tars and for samples without
    label.
    """

    def __init__(self, pattern: str, labelled: bool = True, max_tars: int = 0):
        self.root = pattern
        paths = _tar_paths(pattern)
        paths = paths[:max_tars or None]
        parts = [_tar_index(path, self._flag) for path in paths]
        self._files = OpenFiles(paths, self._flag)
        self._ends = np.cumsum([len(part["offsets"]) for part in parts], dtype=np.int64)
        self._offsets = np.concatenate([part["offsets"] for part in parts])
        self._sizes = np.concatenate([part["sizes"] for part in parts])
        if not len(self._offsets):
            raise UsageError(f"{self._flag}: no images in {len(paths)} tar files; WebDataset's are named key.jpg, with "
                             "the label in key.cls or key.json")
        self.class_names: list[str] = []
        self.labels = np.zeros(len(self), dtype=np.int64)
        if labelled:
            self._take_labels(parts)

    @property
    def _flag(self) -> str:
        return f"--data-path {self.root}"

    def __len__(self) -> int:
        return len(self._offsets)

    def image(self, index: int) -> io.BytesIO:
        """The image's encoded bytes, for `images.decode`."""
        data = bytearray(int(self._sizes[index]))
        self._files.read_into(self._tar(index), int(self._offsets[index]), data)
        return io.BytesIO(data)

    def name(self, index: int) -> str:
        """Tar and member, for messages. A member's header lies directly before its data."""
        header = bytearray(tarfile.BLOCKSIZE)
        tar = self._tar(index)
        self._files.read_into(tar, int(self._offsets[index]) - tarfile.BLOCKSIZE, header)
        member = tarfile.TarInfo.frombuf(bytes(header), "utf-8", "surrogateescape").name
        return f"{self._files.paths[tar]}: {member}"

    def _take_labels(self, parts: list[dict[str, np.ndarray]]) -> None:
        """From every tar's own list of labels to one of all."""
        distinct = sorted(set().union(*(part["labels"].tolist() for part in parts)))
        places = {label: place for place, label in enumerate(distinct)}
        codes = np.concatenate([np.array([places[label] for label in part["labels"].tolist()], dtype=np.int64)[
            part["codes"]] for part in parts if len(part["codes"])])
        if _NO_LABEL in places:
            first = int(np.argmax(codes == places[_NO_LABEL]))
            raise UsageError(f"{self._flag}: {self.name(first)} has no number or name in a .cls or .json file beside "
                             "it; add it, or train without labels with --num-classes 0")
        self.labels, self.class_names = numbered(distinct, codes, self._flag)

    def _tar(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))


def _tar_paths(pattern: str) -> list[str]:
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise UsageError("--data webdataset: webdataset is not installed; pip install webdataset") from error
    if os.path.isdir(pattern):
        paths = sorted(os.path.join(pattern, name) for name in os.listdir(pattern)
                       if name.endswith(".tar") and not name.startswith("."))
        if not paths:
            raise UsageError(f"--data-path {pattern}: no .tar files in it; for class folders of images it is --data "
                             "folder")
        return paths
    if "://" in pattern or pattern.startswith("pipe:"):
        raise UsageError(f"--data-path {pattern}: samples are read by position, so the tars must be local files")
    paths = expand_urls(pattern)
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise UsageError(f"--data-path {pattern}: {missing[0]} is missing; give a folder of .tar files or a pattern "
                         'such as "train-{000..146}.tar"')
    return paths


def _tar_index(path: str, flag: str) -> dict[str, np.ndarray]:
    """Arrays of one tar, from the cache if there: offsets and sizes in bytes of its images, the distinct labels as
    text, and codes, the images' places among those.
    """
    state = os.stat(path)
    said = json.dumps([_INDEX_FORMAT, os.path.realpath(path), state.st_size, state.st_mtime_ns])
    cached = cache_folder() / "tars" / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.npz"
    try:
        with np.load(cached) as arrays:
            return dict(arrays)
    except Exception:  # noqa: BLE001 - not there, or cut off: made anew
        pass
    try:
        rows = list(_tar_samples(path))
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UsageError(f"{flag}: {os.path.basename(path)} is no readable, uncompressed tar file ({error})") from error
    labels, codes = np.unique(np.array([row[2] for row in rows], dtype=np.str_), return_inverse=True)
    arrays = {"offsets": np.array([row[0] for row in rows], dtype=np.int64),
              "sizes": np.array([row[1] for row in rows], dtype=np.int64), "labels": labels, "codes": codes}
    _keep(cached, arrays)
    return arrays


def _keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    beside = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(beside, **arrays)
        os.replace(beside, path)
    except OSError as error:  # the next start looks it up again
        logger.debug("%s: %s", path, error)
        with suppress(OSError):
            beside.unlink()


def _tar_samples(path: str) -> Iterator[tuple[int, int, str]]:
    """(offset, size, label as text) of every sample with an image; files that follow each other with the same key are
    one sample, as in webdataset.
    """
    from webdataset.tariterators import base_plus_ext
    key, image, label = None, None, _NO_LABEL
    with tarfile.open(path, "r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # which it would collect
            base, suffix = base_plus_ext(member.name)
            if base is None or not member.isreg():
                continue
            if base != key:
                if image:
                    yield *image, label
                key, image, label = base, None, _NO_LABEL
            if (suffix := suffix.lower()) in IMAGE_SUFFIXES:
                image = member.offset_data, member.size
            elif suffix in LABEL_SUFFIXES:
                label = _label(tar.extractfile(member).read(), suffix) or label
    if image:
        yield *image, label


def _label(content: bytes, suffix: str) -> str:
    """Label of a .cls or .json file as text, or "" where there is none in it."""
    try:
        text = content.decode("utf-8").strip()
        found = text if suffix == "cls" else json.loads(text)
    except ValueError:
        return _NO_LABEL
    if isinstance(found, dict):
        found = next((found[name] for name in LABEL_NAMES if name in found), None)
    return str(found) if isinstance(found, int | str) and not isinstance(found, bool) else _NO_LABEL


class ArrowIndex:
    """Images and labels of a Hugging Face data set that `save_to_disk` wrote, like `images.ImageIndex`.

    The image column is "image" or the only one of that feature, the label column "label" or the only one of feature
    ClassLabel; labels are numbers or class names. A dictionary of splits gives its "train". With `labelled=False` no
    labels are needed and all are 0.

    Raises UsageError for a missing library, a folder of another kind and missing columns.
    """

    def __init__(self, root: str | Path, labelled: bool = True):
        try:
            import datasets
        except ImportError as error:
            raise UsageError("--data hf: datasets is not installed; pip install datasets") from error
        self.root = os.fspath(root)
        table = self._table(datasets)
        column = self._column(table, datasets.Image, ("image", "img", "jpg", "png"), "image")
        self.class_names: list[str] = []
        self.labels = np.zeros(len(table), dtype=np.int64)
        if labelled:
            name = self._column(table, datasets.ClassLabel, LABEL_NAMES, "label")
            feature = table.features[name]
            values = np.asarray(table.select_columns([name]).with_format("numpy")[:][name])
            distinct, codes = np.unique(values, return_inverse=True)
            self.labels, self.class_names = numbered(distinct.tolist(), codes, f"--data-path {self.root}",
                                                     getattr(feature, "names", None))
        self._column_name = column
        self._images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> io.BytesIO | str:
        """The image's encoded bytes, or the path of its file, for `images.decode`."""
        stored = self._images[index][self._column_name] or {"bytes": b"", "path": None}
        if stored["bytes"] is None and stored["path"]:
            return os.path.join(self.root, stored["path"])
        return io.BytesIO(stored["bytes"] or b"")

    def name(self, index: int) -> str:
        return f"{self.root}: row {index}"

    def _table(self, datasets):
        flag = f"--data-path {self.root}"
        if not os.path.isdir(self.root):
            raise UsageError(f"{flag}: not a folder; Hugging Face's save_to_disk writes one")
        try:
            table = datasets.load_from_disk(self.root)
        except Exception as error:  # the library raises many kinds, all meaning that this is no such folder
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{flag}: not a data set that save_to_disk wrote ({reason})") from error
        if isinstance(table, datasets.DatasetDict):
            if "train" not in table:
                raise UsageError(f"{flag}: has splits {', '.join(table)} and no train; give the folder of one split")
            table = table["train"]
        if not len(table):
            raise UsageError(f"{flag}: the data set is empty")
        return table

    def _column(self, table, feature: type, names: Sequence[str], what: str) -> str:
        fitting = [name for name, kind in table.features.items() if isinstance(kind, feature)]
        if what == "label":  # plain numbers and names will do
            fitting += [name for name in names if name in table.features and name not in fitting]
        named = [name for name in names if name in fitting]
        if not named and len(fitting) != 1:
            advice = " or train without labels with --num-classes 0" if what == "label" else ""
            raise UsageError(f"--data-path {self.root}: no {what} column among {', '.join(table.features)}; name one "
                             f"{names[0]!r}{',' if advice else ''}{advice}")
        return (named or fitting)[0]


def numbered(distinct: Sequence[int | str], codes: np.ndarray, flag: str,
             names: Sequence[str] | None = None) -> tuple[np.ndarray, list[str]]:
    """Labels (N,) int64 and class names, of images with the labels `distinct[codes]`.

    Numbers, also those written as text, stay as they are and are named by `names` where there are any; class names are
    numbered as Python sorts them. Raises UsageError for numbers that number no classes.
    """
    try:
        numbers = np.array([int(label) for label in distinct], dtype=np.int64)
    except (ValueError, OverflowError):
        ordered = sorted(map(str, distinct))
        places = {label: place for place, label in enumerate(ordered)}
        return np.array([places[str(label)] for label in distinct], dtype=np.int64)[codes], ordered
    if numbers.min() < 0 or numbers.max() >= _MAX_CLASSES:
        outside = numbers.min() if numbers.min() < 0 else numbers.max()
        raise UsageError(f"{flag}: has label {outside}; labels are class names or numbers from 0 to {_MAX_CLASSES - 1}")
    class_names = list(names) if names else [str(label) for label in range(int(numbers.max()) + 1)]
    empty = sorted(set(range(len(class_names))) - set(numbers.tolist()))
    if empty:
        logger.warning("%s: %d of %d classes have no image, the first is %s", flag, len(empty), len(class_names),
                       class_names[empty[0]])
    return numbers[codes], class_names
