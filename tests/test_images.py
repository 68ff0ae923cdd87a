"""Image folders: what is found, how it is decoded and cropped, and what happens with files that cannot be read."""
import io

import numpy as np
import pytest
import torch
from PIL import Image

from dit.config import UsageError
from dit.data import PositionDataset, micro_batches
from dit.images import ImageData, ImageIndex, UnreadableImage, crop, decode
from dit.randomness import scalars


def picture(height=20, width=24, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path, pixels=None, **kw):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(picture() if pixels is None else pixels)
    image.save(path, **kw)
    return path


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "Bilder mit Leerzeichen é漢"
    for label, name in enumerate(["b häuser", "a", "c"]):
        for i in range(3):
            save(root / name / f"{i} ü.png", picture(seed=10 * label + i))
    save(root / "c" / "deeper" / "3.JPG")
    (root / "c" / "notes.txt").write_text("no image")
    (root / ".hidden").mkdir()
    save(root / "a" / ".hidden.png")
    return root


def folder_data(root, image_hw, labelled=True, **options):
    return ImageData(ImageIndex(root, labelled), image_hw, **options)


def draws(n, seed=0, flips=None):
    drawn = scalars(seed, np.arange(n), 1000, 0.1)
    return drawn if flips is None else drawn._replace(flips=np.full(n, flips))


def test_index_is_sorted_and_labelled(folder):
    index = ImageIndex(folder)
    assert index.class_names == ["a", "b häuser", "c"]
    assert [index.relative_path(i) for i in range(len(index))] == [
        "a/0 ü.png", "a/1 ü.png", "a/2 ü.png", "b häuser/0 ü.png", "b häuser/1 ü.png", "b häuser/2 ü.png",
        "c/0 ü.png", "c/1 ü.png", "c/2 ü.png", "c/deeper/3.JPG"]
    assert index.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]


def test_unlabelled_folder(folder):
    source = folder_data(folder, (8, 8), labelled=False)
    assert source.num_samples == 10 and source.num_classes == 0
    flat = folder_data(folder / "a", (8, 8), labelled=False)
    assert flat.num_samples == 3 and flat.read(np.arange(3), draws(3))[1].tolist() == [0, 0, 0]


def test_classes_file(folder, tmp_path):
    classes = tmp_path / "classes.txt"
    classes.write_text("# subset, in this order\nc\n\nb häuser\n", encoding="utf-8")
    index = ImageIndex(folder, classes_file=classes)
    assert index.class_names == ["c", "b häuser"] and index.labels.tolist() == [0] * 4 + [1] * 3
    classes.write_text("c\tthing\na\tletter\nb häuser\tthing\n", encoding="utf-8")
    index = ImageIndex(folder, classes_file=classes)
    assert index.class_names == ["thing", "letter"] and index.labels.tolist() == [0] * 4 + [1] * 3 + [0] * 3


@pytest.mark.parametrize(("text", "message"), [
    ("a\nzebra\n", "names 'zebra', which is no folder"), ("a\na\n", "'a' stands in it twice"),
    ("# only\n", "names no class"), (None, "cannot be read"),
])
def test_bad_classes_file(folder, tmp_path, text, message):
    classes = tmp_path / "classes.txt"
    if text is not None:
        classes.write_text(text)
    with pytest.raises(UsageError, match=f"--classes-file .*{message}") as caught:
        ImageIndex(folder, classes_file=classes)
    assert "\n" not in str(caught.value)


def test_classes_file_without_labels_is_refused(folder, tmp_path):
    with pytest.raises(UsageError, match="--classes-file .*--num-classes 0"):
        ImageIndex(folder, labelled=False, classes_file=tmp_path / "x")


def test_missing_empty_flat_and_half_empty_folders(tmp_path, folder):
    with pytest.raises(UsageError, match="--data-path .*missing: not a folder"):
        folder_data(tmp_path / "missing", (8, 8))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no class folders in it; it is empty"):
        folder_data(tmp_path / "empty", (8, 8))
    with pytest.raises(UsageError, match="the folder holds no images"):
        folder_data(tmp_path / "empty", (8, 8), labelled=False)
    with pytest.raises(UsageError, match="no class folders in it; make one folder.*--num-classes 0"):
        folder_data(folder / "a", (8, 8))
    (folder / "z").mkdir()
    with pytest.raises(UsageError, match="class folder 'z' holds no images"):
        folder_data(folder, (8, 8))


def test_one_label_per_folder_many_classes_allowed(folder):
    with pytest.raises(UsageError, match="--num-classes 2: the data has 3 classes"):
        PositionDataset(folder_data(folder, (8, 8)), seed=0, noise_shape=(3, 8, 8), num_classes=2)
    PositionDataset(folder_data(folder, (8, 8)), seed=0, noise_shape=(3, 8, 8), num_classes=1000)


def test_pixels_and_flip(tmp_path):
    pixels = picture(8, 8)
    save(tmp_path / "a" / "0.png", pixels)
    source = folder_data(tmp_path, (8, 8))
    plain, _ = source.read(np.array([0]), draws(1, flips=False))
    flipped, _ = source.read(np.array([0]), draws(1, flips=True))
    assert plain.dtype == np.float32 and plain.shape == (1, 3, 8, 8) and plain.flags.c_contiguous
    np.testing.assert_allclose(plain[0], pixels.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)
    assert np.array_equal(flipped, plain[..., ::-1]) and plain.min() >= -1 and plain.max() <= 1


def reference_center_crop(image, size):
    """ADM's crop written down from its description, square only."""
    while min(image.size) >= 2 * size:
        image = image.resize(tuple(side // 2 for side in image.size), resample=Image.BOX)
    scale = size / min(image.size)
    image = image.resize(tuple(round(side * scale) for side in image.size), resample=Image.BICUBIC)
    pixels = np.array(image)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top:top + size, left:left + size]


@pytest.mark.parametrize("hw", [(64, 64), (65, 131), (200, 90), (33, 40), (8, 9), (16, 16), (31, 1000)])
def test_center_crop_is_adms(hw):
    image = Image.fromarray(picture(*hw))
    cropped = crop(image, (16, 16), "center-crop", np.zeros(3))
    assert np.array_equal(np.asarray(cropped), reference_center_crop(image, 16))


@pytest.mark.parametrize("target", [(16, 16), (8, 24), (24, 8), (17, 5)])
@pytest.mark.parametrize("mode", ["center-crop", "random-crop", "resize"])
@pytest.mark.parametrize("hw", [(64, 64), (10, 50), (50, 10), (17, 5), (16, 300)])
def test_every_crop_has_the_asked_size(target, mode, hw):
    for draw in (np.zeros(3), np.array([0.5, 0.3, 0.7]), np.full(3, 1 - 2**-53)):
        assert crop(Image.fromarray(picture(*hw)), target, mode, draw).size == target[::-1]


def test_random_crop_moves_with_the_position(tmp_path):
    save(tmp_path / "a" / "0.png", picture(40, 40))
    source = folder_data(tmp_path, (16, 16), augment="random-crop")
    dataset = PositionDataset(source, seed=0, noise_shape=(3, 16, 16), flip=False)
    batch = dataset.__getitems__(range(16))["x"]
    assert len(torch.unique(batch.flatten(1), dim=0)) > 10
    assert torch.equal(batch[5], dataset[5]["x"])


def test_flip_can_be_switched_off(tmp_path):
    save(tmp_path / "a" / "0.png")
    def distinct(flip):
        dataset = PositionDataset(folder_data(tmp_path, (16, 16)), seed=0, noise_shape=(3, 16, 16), flip=flip)
        return len(torch.unique(dataset.__getitems__(range(16))["x"].flatten(1), dim=0))
    assert distinct(True) == 2 and distinct(False) == 1


def test_transparency_is_laid_over_white(tmp_path):
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)  # transparent black
    pixels[:4] = (10, 20, 30, 255)
    rgb = np.asarray(decode(save(tmp_path / "a.png", Image.fromarray(pixels))))
    assert rgb[0, 0].tolist() == [10, 20, 30] and rgb[7, 0].tolist() == [255, 255, 255]
    grey = Image.fromarray(pixels).convert("LA")
    assert np.asarray(decode(save(tmp_path / "la.png", grey)))[7, 0].tolist() == [255, 255, 255]


def test_palette_grey_cmyk_16_bit_and_one_bit(tmp_path):
    image = Image.fromarray(np.full((8, 8, 3), (200, 100, 50), dtype=np.uint8))
    assert np.asarray(decode(save(tmp_path / "p.png", image.quantize(4))))[0, 0].tolist() == [200, 100, 50]
    transparent = image.quantize(4)
    save(tmp_path / "pt.gif", transparent, transparency=transparent.getpixel((0, 0)))
    assert np.asarray(decode(tmp_path / "pt.gif"))[0, 0].tolist() == [255] * 3
    cmyk = np.asarray(decode(save(tmp_path / "c.jpg", image.convert("CMYK"), quality=95)))[0, 0].astype(int)
    assert abs(cmyk - [200, 100, 50]).max() < 12
    deep = Image.fromarray(np.full((8, 8), 32896, dtype=np.uint16))
    assert np.asarray(decode(save(tmp_path / "d.png", deep)))[0, 0].tolist() == [128] * 3
    assert np.asarray(decode(save(tmp_path / "d.tif", deep)))[0, 0].tolist() == [128] * 3
    assert np.asarray(decode(save(tmp_path / "l.png", image.convert("L")))).shape == (8, 8, 3)
    assert np.asarray(decode(save(tmp_path / "1.png", Image.new("1", (8, 8), 1))))[0, 0].tolist() == [255] * 3


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # shown rotated by 90 degrees clockwise
    image = decode(save(tmp_path / "a.jpg", picture(10, 30), exif=exif))
    assert image.size == (10, 30)


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "float", "deep", "bomb", "gone"])
def test_what_cannot_be_decoded_is_named(tmp_path, kind, monkeypatch):
    path = tmp_path / "x.png"
    buffer = io.BytesIO()
    Image.fromarray(picture()).save(buffer, "PNG")
    if kind in ("truncated", "empty", "text"):
        path.write_bytes({"truncated": buffer.getvalue()[:200], "empty": b"", "text": b"hello"}[kind])
    elif kind == "float":
        Image.fromarray(np.zeros((4, 4), dtype=np.float32)).save(path, "TIFF")
    elif kind == "deep":
        Image.fromarray(np.full((4, 4), 1 << 20, dtype=np.int32)).save(path, "TIFF")
    elif kind == "bomb":
        monkeypatch.setattr("dit.images.MAX_PIXELS", 100)
        path.write_bytes(buffer.getvalue())
    with pytest.raises(UnreadableImage) as caught:
        decode(path)
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_replaced_counted_and_named_once(folder, workers, caplog):
    broken = folder / "a" / "1 ü.png"
    broken.write_bytes(b"not an image")
    dataset = PositionDataset(folder_data(folder, (8, 8)), seed=0, noise_shape=(3, 8, 8))
    loader = micro_batches(dataset, start_step=0, global_batch=10, num_workers=workers)
    batches = [next(loader) for _ in range(4)]
    loader.close()
    assert list(loader.unreadable) == [str(broken)] and caplog.text.count("unreadable image 1") == 1
    again = PositionDataset(folder_data(folder, (8, 8)), seed=0, noise_shape=(3, 8, 8))
    assert torch.equal(torch.cat([b["x"] for b in batches]), again.__getitems__(range(40))["x"])
    source = folder_data(folder, (8, 8))
    x, y = source.read(np.array([1, 2]), draws(2, flips=False))
    assert np.array_equal(x[0], x[1]) and y.tolist() == [0, 0]


def test_a_folder_of_broken_images_ends_with_one_line(folder):
    for path in (folder / "a").iterdir():
        path.write_bytes(b"")
    source = folder_data(folder / "a", (8, 8), labelled=False)
    with pytest.raises(UsageError, match=r"3 images in a row cannot be read, the first is .*0 ü.png") as caught:
        source.read(np.array([0]), draws(1))
    assert "\n" not in str(caught.value)


def test_unknown_crop(folder):
    with pytest.raises(UsageError, match="--augment middle: one of center-crop"):
        folder_data(folder, (8, 8), augment="middle")
