"""Signals that ask a run to save and leave."""

import signal


class Interruption:
    """SIGTERM and SIGUSR1 (a scheduler's preemption) and SIGINT (Ctrl-C) ask the loop to save and leave.

    They are noted inside this context; ``signal_number`` is the last one, or None. A second Ctrl-C ends the process at
    once, wherever it is: the system's own handling is put back, which waits for nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __enter__(self) -> "Interruption":
        self.signal_number: int | None = None
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.signal_number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
