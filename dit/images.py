"""Photographs: a compact index of a folder, decoding, cropping, and what happens with files that cannot be read."""
from __future__ import annotations

import hashlib
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps

from dit.config import UsageError

EXTENSIONS = frozenset(
    [".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif"]
)
AUGMENTS = ("center-crop", "random-crop", "resize")
MAX_PIXELS = 1 << 27  # 134 megapixels, 0.4 GB as RGB: more is a decompression bomb or does not belong in a training set
_MIN_SCALE = 0.8  # a random crop keeps at least this share of the shorter side, as in ADM


class UnreadableImage(Exception):
    """One file that cannot be used, with the reason; readers skip it and count it."""


def decode(source: str | Path | IO[bytes]) -> Image.Image:
    """A file, given by its path or open, as an upright 8-bit RGB image.

    Transparency is laid over white, 16-bit grey is scaled to 8, EXIF orientation is applied, CMYK and palettes are
    converted. Raises UnreadableImage for everything that is no picture of this kind.
    """
    try:
        with nullcontext(source) if hasattr(source, "read") else open(source, "rb") as file, Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UnreadableImage(f"{image.width}x{image.height} pixels, at most {MAX_PIXELS} are decoded")
            image.load()
            return to_rgb(ImageOps.exif_transpose(image) if image.getexif() else image)
    except UnreadableImage:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ... on broken files
        raise UnreadableImage(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Any of PIL's modes to RGB; raises UnreadableImage where no 8-bit meaning is defined."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise UnreadableImage("32-bit integer pixels; 8 or 16 bits are handled")
        return Image.fromarray((values / 257.0).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnreadableImage("floating-point pixels; 8 or 16 bits are handled")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")
    return image.convert("RGB")


def crop(image: Image.Image, image_hw: tuple[int, int], mode: str, draws: np.ndarray) -> Image.Image:
    """One image at (H, W). `draws` (3,) in [0, 1) places a random crop and is unused otherwise.

    "center-crop" is ADM's crop (Dhariwal and Nichol 2021, their image_datasets.py), which the DiT paper's numbers rest
    on: halve by box filter while the image stays at least twice the target, then bicubic until it just covers the
    target, then cut the middle. "random-crop" scales so that the target is 80 to 100 % of the shorter side and cuts
    anywhere. "resize" ignores the aspect ratio.
    """
    height, width = image_hw
    if mode == "resize":
        return image.resize((width, height), Image.Resampling.BICUBIC)
    cover = 1.0 if mode == "center-crop" else 1.0 / (_MIN_SCALE + (1.0 - _MIN_SCALE) * float(draws[2]))
    height_cover, width_cover = math.ceil(height * cover), math.ceil(width * cover)
    while image.width >= 2 * width_cover and image.height >= 2 * height_cover:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(height_cover / image.height, width_cover / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    image = image.resize(size, Image.Resampling.BICUBIC)
    spare = np.array([image.height - height, image.width - width])
    top, left = spare // 2 if mode == "center-crop" else (np.asarray(draws[:2]) * (spare + 1)).astype(int)
    return image.crop((int(left), int(top), int(left) + width, int(top) + height))


def to_unit_range(pixels: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, 3) -> float32 (N, 3, H, W) in [-1, 1]."""
    x = pixels.transpose(0, 3, 1, 2).astype(np.float32, order="C")
    x *= np.float32(1.0 / 127.5)
    x -= np.float32(1.0)
    return x


class ImageIndex:
    """Relative paths and labels of the images of a folder, in two flat arrays instead of a list.

    14 M paths are half a gigabyte that forked workers share (a list of strings would be copied page by page by its
    reference counts). Order: by class, then by path, both as Python sorts strings, so that it is the same on every file
    system.

    Labels come from the class folders' sorted names, or from `classes_file`; with `labelled=False` every image below
    `root` belongs to class 0. Raises UsageError for a missing or empty folder, a class without images, a class file
    that names other folders.
    """

    def __init__(self, root: str | Path, labelled: bool = True, classes_file: str | Path | None = None):
        self.root = os.fspath(root)
        if not os.path.isdir(self.root):
            raise UsageError(f"--data-path {self.root}: not a folder; expected one with a folder of images per class")
        if classes_file is not None and not labelled:
            raise UsageError(f"--classes-file {classes_file}: unconditional training (--num-classes 0) has no classes; "
                             "drop one of the two")
        groups = self._class_groups(classes_file) if labelled else [("", 0)]
        self.class_names = self._names if labelled else []
        names: list[bytes] = []
        labels: list[np.ndarray] = []
        for folder, label in groups:
            found = list_images(os.path.join(self.root, folder) if folder else self.root)
            if not found:
                where = f"class folder {folder!r} holds" if folder else "the folder holds"
                raise UsageError(f"--data-path {self.root}: {where} no images ({', '.join(sorted(EXTENSIONS))}); "
                                 "remove it, or list the wanted classes with --classes-file")
            names += [os.fsencode(os.path.join(folder, name)) for name in found]
            labels.append(np.full(len(found), label, dtype=np.int64))
        self.labels = np.concatenate(labels)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._blob = np.frombuffer(b"".join(names), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def sha256(self) -> str:
        """Hash of all paths and labels, in order."""
        digest = hashlib.sha256()
        for array in (self._blob, self._ends, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def relative_path(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._blob[start:self._ends[index]].tobytes())

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.relative_path(index))

    image = name = path  # what `decode` takes, and what messages say

    def _class_groups(self, classes_file) -> list[tuple[str, int]]:
        try:
            with os.scandir(self.root) as entries:
                folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        except OSError as error:
            raise UsageError(f"--data-path {self.root}: cannot be read ({error.strerror})") from None
        if not folders:
            advice = "" if list_images(self.root) else "it is empty; "
            raise UsageError(f"--data-path {self.root}: no class folders in it; {advice}make one folder of images per "
                             "class, or train without classes on a flat folder with --num-classes 0")
        if classes_file is None:
            self._names = folders
            return list(zip(folders, range(len(folders))))
        groups, self._names = read_classes_file(classes_file)
        unknown = [folder for folder, _ in groups if folder not in set(folders)]
        if unknown:
            raise UsageError(f"--classes-file {classes_file}: names {unknown[0]!r}, which is no folder of {self.root}; "
                             f"it has {', '.join(folders[:5])}{', ...' if len(folders) > 5 else ''}")
        return groups


def list_images(folder: str) -> list[str]:
    """Sorted paths, relative to `folder`, of all images below it; hidden files and folders are left out, links are
    followed. Raises UsageError for a folder that cannot be read, whose images would silently be missing.
    """
    def refuse(error: OSError) -> None:
        raise UsageError(f"--data-path {error.filename}: cannot be read ({error.strerror})")

    found = []
    for directory, subfolders, files in os.walk(folder, onerror=refuse, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        prefix = os.path.relpath(directory, folder)
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS:
                found.append(name if prefix == "." else os.path.join(prefix, name))
    return sorted(found)


def read_classes_file(path: str | Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Lines `folder` or `folder<TAB>class name` -> [(folder, label)], class names.

    Labels number the class names in the order of first appearance; several folders may share one. Empty lines and lines
    that begin with # are left out. Raises UsageError for a missing or empty file and for a folder named twice.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--classes-file {path}: cannot be read as UTF-8 text ({error})") from error
    labels: dict[str, int] = {}
    groups: dict[str, int] = {}
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        folder, _, name = line.strip().partition("\t")
        if folder in groups:
            raise UsageError(f"--classes-file {path}: {folder!r} stands in it twice; one line per folder")
        groups[folder] = labels.setdefault(name.strip() or folder, len(labels))
    if not groups:
        raise UsageError(f"--classes-file {path}: names no class; one folder name per line")
    return list(groups.items()), list(labels)


class ImageData:
    """Images of an index as (3, H, W) float32 in [-1, 1].

    An index has `labels` (N,), `class_names` (none: unlabelled), `root`, `image(i)` for `decode` and `name(i)` for
    messages: an `ImageIndex`, or one of `dit.packed_images`.

    An image that cannot be decoded is replaced by the next readable one in the index (usually of the same class), so a
    sample stays a function of the data and the position; `read` lists what it replaced in `unreadable`, {name: reason}.
    """

    holds_moments = False
    MAX_REPLACEMENTS = 100

    def __init__(self, index, image_hw: tuple[int, int], *, augment: str = "center-crop"):
        if augment not in AUGMENTS:
            raise UsageError(f"--augment {augment}: one of {', '.join(AUGMENTS)} is right")
        self.index, self.image_hw, self.augment = index, tuple(image_hw), augment
        self.num_samples, self.class_names = len(index.labels), index.class_names
        self.num_classes = len(self.class_names)
        self.sample_shape = (3, *self.image_hw)
        self.unreadable: dict[str, str] = {}

    def read(self, indices: np.ndarray, scalars, posterior_noise=None) -> tuple[np.ndarray, np.ndarray]:
        pixels = np.empty((len(indices), *self.image_hw, 3), dtype=np.uint8)
        labels = np.empty(len(indices), dtype=np.int64)
        for row, index in enumerate(indices):
            image, index = self._first_readable(int(index))
            pixels[row] = np.asarray(crop(image, self.image_hw, self.augment, scalars.crops[row]))
            labels[row] = self.index.labels[index]
        pixels[scalars.flips] = pixels[scalars.flips, :, ::-1]
        return to_unit_range(pixels), labels

    def _first_readable(self, index: int) -> tuple[Image.Image, int]:
        first = None
        for step in range(min(self.MAX_REPLACEMENTS, self.num_samples)):
            candidate = (index + step) % self.num_samples
            try:
                return decode(self.index.image(candidate)), candidate
            except UnreadableImage as error:
                name = self.index.name(candidate)
                self.unreadable[name] = str(error)
                first = first or f"{name} ({error})"
        raise UsageError(f"--data-path {self.index.root}: {step + 1} images in a row cannot be read, "
                         f"the first is {first}")
