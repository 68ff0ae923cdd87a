"""Runs train.py in processes of their own, as often as a test wants to kill them.

A fork server imports torch and the project once, so that a session starts in a tenth of a second instead of several.
The commands are those of a user: ``train.py``'s arguments, its exit codes, what it prints.
"""

import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ("--config", str(ROOT / "configs" / "tiny.toml"), "--plan", "off")
EXACT = ("loss", "grad_norm", "lr", "skipped", "loss_scale")
"""What of a logged step must not depend on how often the run was interrupted."""

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preloaded"])


class Session:
    """One process of train.py (or several ranks of one job are several). ``text`` is what it has printed so far."""

    def __init__(self, *args: object, log: Path, env: dict[str, str] | None = None,
                 inject: Callable[..., None] | None = None, values: tuple = ()):
        self._log = log
        log.touch()
        self.started = time.monotonic()
        self._process = _context.Process(target=_train, daemon=False, args=(
            [str(arg) for arg in args], str(log), env or {}, inject, values))
        self._process.start()

    @property
    def text(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def taken(self) -> float:
        """Seconds since the session was started; importing torch and the project is not in them."""
        return time.monotonic() - self.started

    def send(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float = 60) -> int:
        """The exit code; a negative one is the number of the signal that ended it."""
        self._process.join(timeout)
        if self.is_running:
            self._process.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.text}")
        return self._process.exitcode

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Until ``text`` has been printed."""
        end = time.monotonic() + timeout
        while text not in self.text:
            assert time.monotonic() < end and self.is_running, f"{text!r} was not printed:\n{self.text}"
            time.sleep(0.005)


def run(folder: Path, *args: object, inject: Callable[..., None] | None = None, values: tuple = (),
        code: int = 0, timeout: float = 60, logs: Path | None = None) -> str:
    """A session on ``folder`` from start to end, which must have exit code ``code``. Returns what it printed."""
    session = start(folder, *args, inject=inject, values=values, logs=logs)
    ended = session.wait(timeout)
    assert ended == code, f"exit code {ended} instead of {code}:\n{session.text}"
    return session.text


def start(folder: Path, *args: object, inject: Callable[..., None] | None = None, values: tuple = (),
          logs: Path | None = None) -> Session:
    """A session whose output goes into ``logs``, by default beside ``folder``."""
    logs = logs or folder.parent
    log = logs / f"{folder.name}.{len(list(logs.glob(f'{folder.name}.*.log')))}.log"
    return Session(*TINY, "--run-dir", folder, *args, log=log, inject=inject, values=values)


def start_ranks(folder: Path, world_size: int, *args: object, inject: Callable[..., None] | None = None,
                values: tuple = ()) -> list[Session]:
    """The ranks of a job, as torchrun would start them."""
    number = len(list(folder.parent.glob(f"{folder.name}.*.0.log")))
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [Session(*TINY, "--run-dir", folder, *args, inject=inject, values=values,
                    log=folder.parent / f"{folder.name}.{number}.{rank}.log",
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world_size)]


def run_ranks(folder: Path, world_size: int, *args: object, code: int = 0, **kwargs) -> str:
    """A job from its start to its end; every rank must have exit code ``code``. Returns what all printed, by rank."""
    sessions = start_ranks(folder, world_size, *args, **kwargs)
    codes = [session.wait() for session in sessions]
    text = "".join(session.text for session in sessions)
    assert codes == [code] * world_size, f"exit codes {codes}:\n{text}"
    return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _train(args: list[str], log: str, env: dict[str, str], inject: Callable[..., None] | None, values: tuple) -> None:
    import torch

    from dit.cli import run as run_command

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - the process's own
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **env})
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loader workers start as they do under plain python
    sys.argv = ["train.py", *args]
    if inject is not None:
        inject(*values)
    run_command(runpy.run_path(str(ROOT / "train.py"))["main"])


# ---- what a run has come to ----

def state(folder: Path, step: int) -> dict:
    """The checkpoint file of a step."""
    from dit import checkpoint

    return checkpoint.load(checkpoint.path_of(folder / "checkpoints", step))


def logged(folder: Path) -> list[dict]:
    """The exact part of every logged step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line)[key] for key in ("step", *EXACT)} for line in lines]


def difference(one: Path, other: Path, step: int) -> list[str]:
    """What differs between two runs at ``step``: tensors of the checkpoint file, by path, and logged steps. Bitwise."""
    from dit.saving import named_tensors

    first, second = (dict(named_tensors(state(folder, step))) for folder in (one, other))
    found = sorted(first.keys() ^ second.keys())
    found += [name for name in first.keys() & second.keys()
              if first[name].numpy().tobytes() != second[name].numpy().tobytes()]
    lines = [logged(folder) for folder in (one, other)]
    found += [f"logged step {index}" for index, (a, b) in enumerate(zip(*lines)) if a != b]
    return found + ([f"{len(lines[0])} and {len(lines[1])} logged steps"] if len(lines[0]) != len(lines[1]) else [])
