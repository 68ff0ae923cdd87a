"""Many files read at random places: descriptors that open when first needed and never become too many."""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dit.config import UsageError

MAX_OPEN = 512


class OpenFiles:
    """Reads from numbered files, at most `MAX_OPEN` of them open per process; the longest open is closed first.

    `flag` begins the messages of the UsageErrors for files that cannot be opened or have become shorter.
    """

    def __init__(self, paths: Sequence[str | Path], flag: str):
        self.paths, self.flag = paths, flag
        self._handles: dict[int, int] = {}

    def read_into(self, number: int, offset: int, buffer) -> None:
        """Fill a writable buffer from one file's bytes at `offset`."""
        if os.preadv(self._handle(number), [buffer], offset) != memoryview(buffer).nbytes:
            raise UsageError(f"{self.flag}: {os.path.basename(self.paths[number])} has become shorter; make it again")

    def _handle(self, number: int) -> int:
        handle = self._handles.get(number)
        if handle is None:
            if len(self._handles) >= MAX_OPEN:
                os.close(self._handles.pop(next(iter(self._handles))))
            try:
                handle = self._handles[number] = os.open(self.paths[number], os.O_RDONLY)
            except OSError as error:
                raise UsageError(f"{self.flag}: {os.path.basename(self.paths[number])} cannot be opened "
                                 f"({error.strerror})") from error
        return handle

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_handles": {}}
