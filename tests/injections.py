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


def slow_disk(seconds: float) -> None:
    """Flushing a file takes so long."""
    fsync = os.fsync

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
