#!/usr/bin/env python3
"""Encode a folder of images once, into what ``train.py --data latents --data-path DIR`` reads.

    python scripts/extract_latents.py --data-path IMAGES --vae ema --image-size 256 --output LATENTS
    torchrun --nproc_per_node=8 scripts/extract_latents.py ...    # shards are dealt out; the output folder is shared
    python scripts/extract_latents.py --verify LATENTS            # compare every shard with its checksum

Killed at any moment and started again with the same command, it goes on and ends with the same bytes. Exit code 2 for a
mistake in flags or files.
"""
from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dit import cli  # noqa: E402
from dit.config import UsageError  # noqa: E402

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(args: list[str]) -> None:
    flags = parse(args)
    if flags.verify:
        verify(flags.verify)
        return
    import torch

    from dit.codec import build_codec
    from dit.extraction import Extraction, extract, finish, prepare
    from dit.images import ImageIndex

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no GPU here; leave the flag out to use the CPU")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = flags.tf32
    index = ImageIndex(flags.data_path, labelled=flags.num_classes != 0, classes_file=flags.classes_file)
    if flags.num_classes and flags.num_classes != len(index.class_names):
        raise UsageError(f"--num-classes {flags.num_classes}: {flags.data_path} has {len(index.class_names)} classes; "
                         "leave it out, or give 0 for images without labels")
    codec = build_codec(flags.vae, device=device, dtype=getattr(torch, DTYPES[flags.dtype]), compiled=flags.compile,
                        with_hash=True)
    if codec.vae is None:
        raise UsageError("--vae none: pixel space has no latents to extract; train with --data folder --vae none")
    size = flags.image_size
    extraction = Extraction(index, codec, Path(flags.output), (size[0], size[-1]), flags.augment, flags.batch_size,
                            flags.shard_images)
    pending = prepare(extraction)
    if rank == 0:
        say(f"{len(index):,} images, {len(index.class_names)} classes -> {extraction.num_shards} shards of "
            f"{extraction.images_per_shard:,}, {extraction.planned_bytes / 2**30:.2f} GiB; {len(pending)} to make, "
            f"on {world} x {device.type} in {flags.dtype}")
    mine = [shard for shard in pending if shard % world == rank]  # by number: others may be done already
    images = sum(min(extraction.images_per_shard, len(index) - shard * extraction.images_per_shard) for shard in mine)
    extract(extraction, mine, num_workers=flags.num_workers, progress=Progress(images, rank))
    if rank == 0:
        report(finish(extraction, wait=lambda missing: say(f"waiting for {missing} shards of other processes")),
               flags.output)


def parse(args: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", help="folder of images, one folder per class")
    parser.add_argument("--output", help="folder of the latents; made when missing, continued when begun")
    parser.add_argument("--vae", default="ema", help="ema, mse, a folder, a .safetensors file or a hub name")
    parser.add_argument("--image-size", type=positive, nargs="+", default=[256],
                        help="pixels: one number, or height and width")
    parser.add_argument("--num-classes", type=int, default=None, help="0: images without labels, in any folders")
    parser.add_argument("--classes-file", help="subset and order of class folders, or a map (folder TAB class)")
    parser.add_argument("--augment", choices=["center-crop", "resize"], default="center-crop")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32",
                        help="of the VAE; the official ones overflow in fp16")
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=True, help="tensor cores in fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the VAE")
    parser.add_argument("--batch-size", type=positive, default=32, help="images encoded at once")
    parser.add_argument("--shard-images", type=int, default=0, help="images per shard; 0: at most 512 shards")
    parser.add_argument("--num-workers", type=int, default=4, help="decoding processes; 0: none")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument("--verify", metavar="DIR", help="only compare the shards in DIR with their checksums")
    flags = parser.parse_args(args)
    if not flags.verify:
        for name in ("data_path", "output"):
            if not getattr(flags, name):
                raise UsageError(f"--{name.replace('_', '-')} is needed")
        if len(flags.image_size) > 2:
            raise UsageError(f"--image-size {' '.join(map(str, flags.image_size))}: one number, or height and width")
        for name in ("shard_images", "num_workers", "num_classes"):
            if (getattr(flags, name) or 0) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(flags, name)}: must not be negative")
    return flags


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(message)


def positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def verify(root: str) -> None:
    from dit.latents import LatentData, verify_shards
    data = LatentData(root)
    verify_shards(data.root, data.manifest)
    print(f"{root}: {data.num_samples:,} images in {len(data.manifest['shards'])} shards, all as in the manifest")


class Progress:
    """Images per second of this session and remaining time, every ten seconds, from the first process."""

    EVERY_SECONDS = 10.0

    def __init__(self, total: int, rank: int, clock: Callable[[], float] = time.monotonic):
        self.total, self.rank, self.clock = total, rank, clock
        self.done, self.start = 0, clock()
        self.said = self.start

    def __call__(self, images: int) -> None:
        self.done += images
        now = self.clock()
        if self.rank == 0 and (now - self.said > self.EVERY_SECONDS or self.done == self.total):
            self.said = now
            rate = self.done / max(now - self.start, 1e-9)
            minutes, seconds = divmod(round((self.total - self.done) / rate), 60)
            say(f"{self.done:,} of {self.total:,} images of this process, {rate:.1f} images/s, "
                f"{minutes}:{seconds:02d} left")


def report(manifest: dict, output: str) -> None:
    say(f"{output}: {manifest['num_images']:,} images in {len(manifest['shards'])} shards, "
        f"{manifest['num_unreadable']} unreadable and left out, "
        f"standard deviation of the latents {manifest['latent_std_overall']:.3f}")
    for entry in manifest["unreadable"][:10]:
        say(f"  unreadable: {entry['path']} ({entry['reason']})")
    for name, count in zip(manifest["class_names"], manifest["images_per_class"]):
        if not count:
            say(f"  warning: no image of class {name!r} is readable")
    size = " ".join(map(str, dict.fromkeys(manifest["image_size"])))
    say(f"train with: python train.py --data latents --data-path {shlex.quote(output)} --image-size {size} "
        f"--num-classes {len(manifest['class_names'])}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
