"""Faults, put into a session before its command begins (see ``sessions``)."""

import os
import signal
import time

import torch


def kill_in_event(number: int) -> None:
    """SIGKILL at the ``number``-th of the moments at which files or weights are half changed.

    Those are the phases of the steps, and in a save: while the file is written, before and after it is flushed, before
    and after it gets its name, and while old files are deleted.
    """
    import dit.pulse
    from dit import checkpoint

    left = number

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def wrapped(*args, **kwargs):
            tick()
            result = inner(*args, **kwargs)
            tick()
            return result

        setattr(owner, name, wrapped)

    around(dit.pulse.Pulse, "mark")
    around(os, "fsync")
    around(os, "replace")
    around(checkpoint, "prune")
    half_write_then(tick)


def kill_in_save(moment: str) -> None:
    """SIGKILL in the first save: "half written", "before its name", "after its name" or "old ones deleted"."""
    from dit import checkpoint

    def die(*_args, **_kwargs) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "half written":
        half_write_then(die)
    elif moment == "before its name":
        os.replace, replace = (lambda *paths: die() if str(paths[1]).endswith(".pt") else replace(*paths)), os.replace
    elif moment == "after its name":
        checkpoint.prune = die
    else:
        prune = checkpoint.prune
        checkpoint.prune = lambda *args: (prune(*args), die())


def half_write_then(tick) -> None:
    """``tick`` is called when half of a checkpoint file has been written."""
    save = torch.save

    def half(state, file):
        save(state, file)
        size = file.tell()
        file.flush()
        os.ftruncate(file.fileno(), size // 2)
        tick()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        file.seek(0)
        save(state, file)

    torch.save = half


def slow_disk(seconds: float, seconds_per_beat: float = 1.0) -> None:
    """Flushing a file takes so long; ranks tell each other that they live every ``seconds_per_beat``."""
    import dit.pulse

    dit.pulse.SECONDS_PER_BEAT, fsync = seconds_per_beat, os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


def signal_at_step(step: int, *numbers: int) -> None:
    """The process gets these signals in the forward of ``step`` or, where it begins later, of its first."""
    import dit.pulse

    mark, left = dit.pulse.Pulse.mark, list(numbers)

    def marked(self, now: int, phase: str) -> None:
        mark(self, now, phase)
        while left and now >= step and phase == "forward":
            os.kill(os.getpid(), left.pop(0))

    dit.pulse.Pulse.mark = marked


def no_room(free_bytes: int, from_save: int) -> None:
    """The disk says it has so little room from the ``from_save``-th question on (the first comes at the start)."""
    import shutil
    from types import SimpleNamespace

    asked, real = 0, shutil.disk_usage

    def usage(path):
        nonlocal asked
        asked += 1
        return SimpleNamespace(free=free_bytes) if asked >= from_save else real(path)

    shutil.disk_usage = usage


def no_spare(unasked: bool = False) -> None:
    """A save leaves no spare room on a tiny disk; ``unasked``: the free bytes are not asked for, so it runs into it."""
    import dit.saving

    dit.saving._SPARE_BYTES = 0
    if unasked:
        no_room(2**40, 1)


def file_limit(size: int) -> None:
    """The system lets no file of this process grow beyond ``size`` bytes."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def checkpoints_vanish(save: int) -> None:
    """The folder of the checkpoint files is gone before the ``save``-th file (from 1) is begun."""
    import shutil

    from dit.saving import Saver

    begin, saves = Saver.save, [0]

    def without_folder(self, step: int, bad_steps: int) -> None:
        saves[0] += 1
        if saves[0] == save and self._ranks.is_main:
            shutil.rmtree(self._folder.checkpoints)
        begin(self, step, bad_steps)

    Saver.save = without_folder


def bad_numbers(kind: str, steps: tuple[int, ...], rank: int = 0) -> None:
    """Not finite in ``steps``, on one rank: "loss", "loss alone" (its gradients are finite), "module" or "data"."""
    import dit.pulse
    from dit.data import PositionDataset
    from dit.diffusion import Diffusion
    from dit.model import DiTBlock

    now, here, mark = [0], int(os.environ.get("RANK", 0)) == rank, dit.pulse.Pulse.mark

    def marked(self, step: int, phase: str) -> None:
        now[0] = step
        mark(self, step, phase)

    dit.pulse.Pulse.mark = marked

    def is_bad() -> bool:
        return here and now[0] in steps

    if kind in ("loss", "loss alone"):
        losses = Diffusion.training_losses

        def changed(self, *args, **kwargs):
            found = losses(self, *args, **kwargs)
            if is_bad():
                found["loss"] = found["loss"] + float("inf") if kind == "loss alone" else found["loss"] * float("nan")
            return found

        Diffusion.training_losses = changed
    elif kind == "module":
        forward = DiTBlock.forward

        def changed(self, x, c):
            return forward(self, x, c) * (float("inf") if is_bad() else 1.0)

        DiTBlock.forward = changed
    else:
        read = PositionDataset.__getitems__

        def changed(self, positions):
            batch = read(self, positions)
            if here and positions[0] // 8 in steps:  # of a global batch of 8
                batch["x"][0, 0, 0, 0] = float("nan")
            return batch

        PositionDataset.__getitems__ = changed


def bad_weights_at(step: int) -> None:
    """The weights become infinite at the end of a step, while its loss and gradients are finite."""
    import dit.step

    update = dit.step._update

    def changed(parts, lr):
        result = update(parts, lr)
        changed.steps += 1
        if changed.steps == step:
            with torch.no_grad():
                parts.model.blocks[0].mlp.fc1.weight[0, 0] = float("inf")
        return result

    changed.steps = 0
    dit.step._update = changed


def memory_for(images: int, or_checkpointed: int = 0, phase: str = "forward", rank: int | None = None) -> None:
    """Memory runs out for micro-batches of more than ``images``; ``or_checkpointed`` fit with checkpointing."""
    import dit.step

    if rank is not None and int(os.environ.get("RANK", 0)) != rank:
        return
    loss, update, seen = dit.step.mean_loss, dit.step._update, [0]

    def check(parts) -> None:
        if seen[0] > max(images, or_checkpointed if parts.model.checkpoint_blocks else 0):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def guarded_loss(parts, latents, batch):
        if latents.is_meta:  # the planner takes the same steps
            return loss(parts, latents, batch)
        seen[0] = len(latents)
        if phase == "forward":
            check(parts)
        return loss(parts, latents, batch)

    def guarded_update(parts, lr):
        if phase == "optimizer" and parts.device.type != "meta":
            check(parts)
        return update(parts, lr)

    dit.step.mean_loss, dit.step._update = guarded_loss, guarded_update


def memory_once(call: int) -> None:
    """Memory runs out in the ``call``-th forward (from 0) of the session, and not again."""
    import dit.step

    loss, calls = dit.step.mean_loss, [0]

    def guarded(parts, latents, batch):
        calls[0] += 1
        if calls[0] == call + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss(parts, latents, batch)

    dit.step.mean_loss = guarded


def lose_rank(rank: int, step: int, how: str) -> None:
    """One rank is lost at a step: "dies" (SIGKILL), "stops" (SIGSTOP), "hangs" in its data or "fails" with an error."""
    import dit.pulse
    import dit.trainer

    dit.pulse.SECONDS_PER_BEAT = 0.2
    if int(os.environ.get("RANK", 0)) != rank or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return
    following, taken = dit.trainer.Feed.__next__, [-1]

    def lost(self):
        taken[0] += 1
        if taken[0] == step:
            if how == "hangs":
                time.sleep(1000)
            if how == "fails":
                raise OSError(5, "Input/output error")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return following(self)

    dit.trainer.Feed.__next__ = lost
