"""What the tests inject and what comes of it, for the table of scripts/faults.py; nothing is kept without it."""

import json
import os
from pathlib import Path

import sessions


def record(fault: str, injected: str, *, times: int = 1, after: str, lost: str = "nothing",
           seconds: float | None = None) -> None:
    """Keep a row: ``after`` is what the run did, ``seconds`` what it took to go on with the same command, if it had to.

    To be called after what it claims has been asserted.
    """
    if "FAULT_REPORT" in os.environ:
        with open(os.environ["FAULT_REPORT"], "a") as file:
            row = {"fault": fault, "injected": injected, "times": times, "after": after, "lost": lost,
                   "seconds": seconds}
            file.write(json.dumps(row) + "\n")


def goes_on(reference: Path, folder: Path, *args: object, fault: str, injected: str, times: int = 1,
            after: str = "the same command went on", logs: Path | None = None, **kwargs) -> str:
    """The same command again ends the run as an uninterrupted one, bitwise. Returns what it printed."""
    session = sessions.start(folder, *args, logs=logs, **kwargs)
    session.wait_for(" to go")
    seconds = session.taken()
    assert session.wait() == 0, session.text
    assert sessions.difference(reference, folder, last_step(reference)) == []
    record(fault, injected, times=times, after=after, lost="nothing (bitwise)", seconds=seconds)
    return session.text


def last_step(folder: Path) -> int:
    return 1 + sessions.logged(folder)[-1]["step"]
