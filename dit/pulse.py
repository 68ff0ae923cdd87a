"""Signs of life between the processes of a job: which rank is where, and a named end when one dies or hangs.

The loop marks where it is; that costs an assignment. A thread of every rank tells the others once a second through the
job's key-value store, and leaves with all of them when one has stopped. A rank that waits for another inside a
collective cannot act for itself, so the thread ends the process.
"""

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

import torch.distributed as dist

from dit.config import UsageError
from dit.parallel import Ranks

EXIT_LOST = 4
"""Exit code of a job one of whose processes died or made no progress."""
SECONDS_PER_BEAT = 1.0
_BEATS_TO_LIVE = 3  # a rank whose beat has not changed for so long gives no sign of life
_LEAVE = "leave"
_ADVICE = "The same command goes on from the newest checkpoint file, and torchrun --max-restarts gives it by itself"
Phase = Callable[[str], AbstractContextManager]


class RankLost(RuntimeError):
    """A process of the job died. The message names its rank, the step and the phase."""

    exit_code = EXIT_LOST


class Pulse:
    """Where this rank is (``step``, ``phase``), told to the others; a context around the training loop.

    With one process it only keeps the marks. ``timeout_seconds`` without a new mark end the job (0: never). An
    exception that leaves the context on one rank takes the other ranks along, with the same exit code (an attribute
    ``exit_code`` of the exception, 2 for a UsageError, else 1); the others say nothing. ``finish`` is called before
    the thread ends the process, so that a file that is being written can be completed.
    """

    def __init__(self, ranks: Ranks, timeout_seconds: float, finish: Callable[[], None] = lambda: None):
        self._ranks, self._timeout, self._finish = ranks, timeout_seconds, finish
        self.step, self.phase = 0, "start"
        self._marks, self._beat = 0, 0
        self._store, self._thread = None, None
        self._closing, self._in_error = threading.Event(), False

    def mark(self, step: int, phase: str) -> None:
        """This rank begins ``phase`` of ``step``. All ranks make the same marks in the same order."""
        self.step, self.phase = step, phase
        self._marks += 1

    def observe(self, step: int, inner: Phase) -> Phase:
        """The phase observer ``inner`` (see ``dit.step``) with a mark at the beginning of every phase."""
        def phase(name: str) -> AbstractContextManager:
            self.mark(step, name)
            return inner(name)

        return phase

    def __enter__(self) -> "Pulse":
        if self._ranks.world_size > 1:
            self._store = self._connect()
            self._send()
            self._ranks.barrier()  # everybody has a place before anybody reads them
            self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self._store is None:
            return
        self._in_error = error is not None
        try:
            if isinstance(error, Exception):
                self._leave_together(error)
        finally:
            self._closing.set()
            self._thread.join()

    # ---- telling and watching, on the thread ----

    def _connect(self) -> dist.Store:
        """A connection of our own: one shared with the process group would wait behind its requests."""
        job = self._ranks.broadcast(uuid.uuid4().hex)  # a restarted job may find the store of the one before
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=30), wait_for_workers=False)
        return dist.PrefixStore(f"pulse/{job}", store)

    def _send(self) -> None:
        self._beat += 1
        self._store.set(str(self._ranks.rank), json.dumps([self._beat, self._marks, self.step, self.phase]))

    def _watch(self) -> None:
        marks, since = self._marks, time.monotonic()
        while not self._closing.wait(SECONDS_PER_BEAT):
            try:
                self._send()
                if self._in_error:  # the main thread is about to say why
                    continue
                code, waited = self._asked_to_leave(), time.monotonic() - since
                if code is not None:
                    self._end(code)
                if self._marks != marks:
                    marks, since = self._marks, time.monotonic()
                elif self._timeout and waited > self._timeout:
                    reason = self._culprits() or f"every rank waits in step {self.step} ({self.phase})"
                    if self._ask_to_leave(EXIT_LOST):
                        self._end(EXIT_LOST, f"{reason}; nothing has moved for {waited:.0f} s (--rank-timeout)")
            except RuntimeError:
                self._end(EXIT_LOST, f"the job's key-value store, which lives beside rank 0, is gone since step "
                                     f"{self.step} ({self.phase})")

    def _end(self, code: int, reason: str = "") -> None:
        if self._closing.is_set() or self._in_error:
            return
        if reason:
            print(f"stopped: {reason}. {_ADVICE}", file=sys.stderr, flush=True)
        self._finish()
        os._exit(code)

    # ---- who is it ----

    def _culprits(self) -> str | None:
        """The ranks that give no sign of life, else those that are behind the others; None where all are alike."""
        if (silent := self._silent()) is not None:
            return silent
        places = self._places()
        least = min(marks for _, marks, _, _ in places)
        behind = [f"rank {rank} hangs in step {step} ({phase})"
                  for rank, (_, marks, step, phase) in enumerate(places) if marks == least]
        return ", ".join(behind) if len(behind) < len(places) else None

    def _silent(self) -> str | None:
        before = self._places()
        for _ in range(_BEATS_TO_LIVE):
            time.sleep(SECONDS_PER_BEAT)
            self._send()
        names = [f"rank {rank} since step {place[2]} ({place[3]})"
                 for rank, (place, earlier) in enumerate(zip(self._places(), before)) if place[0] == earlier[0]]
        return f"no sign of life from {', '.join(names)}; the others are in step {self.step}" if names else None

    def _places(self) -> list[tuple[int, int, int, str]]:
        """(beat, marks, step, phase) of every rank."""
        return [json.loads(self._store.get(str(rank))) for rank in range(self._ranks.world_size)]

    # ---- leaving together ----

    def _asked_to_leave(self) -> int | None:
        """The exit code with which a rank has asked all to leave, if one has."""
        return int(self._store.get(_LEAVE)) if self._store.check([_LEAVE]) else None

    def _ask_to_leave(self, code: int) -> bool:
        """Ask all ranks to leave with ``code``. Returns False where another rank was first."""
        if self._store.add("asked", 1) > 1:
            return False
        self._store.set(_LEAVE, str(code))
        return True

    def _leave_together(self, error: Exception) -> None:
        """Take the others along, or follow them where ``error`` is only the echo of their end in a collective."""
        try:
            silent, code, first = None, None, False
            if type(error) is RuntimeError or isinstance(error, dist.DistError):
                silent, code = self._silent(), self._asked_to_leave()
            if code is None:
                code = EXIT_LOST if silent else getattr(error, "exit_code", 2 if isinstance(error, UsageError) else 1)
                first = self._ask_to_leave(code)
                if self._ranks.is_main:
                    time.sleep(2 * SECONDS_PER_BEAT)  # the store may live in this process; let the others read it
                if first and silent is None:
                    return
        except RuntimeError:
            silent, first = f"no sign of life from the process beside rank 0 since step {self.step}", True
        if silent is not None and first:
            raise RankLost(f"{silent}. {_ADVICE}") from None
        raise SystemExit(code) from None
