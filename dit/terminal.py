"""What people read in a terminal: figures with their unit, and progress with the time that is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def show(value: float | None, unit: str) -> str:
    """A figure with its unit as people read it: GiB or MiB, ms, %; "not measured" for None."""
    if value is None:
        return "not measured"
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    if unit == "s":
        return f"{1e3 * value:.1f} ms" if value < 10 else f"{value:.2f} s"
    if unit == "1/s":
        return f"{value:.1f}/s"
    return f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    """Seconds as people say them: 8s, 4m05s, 3h12m, 2d07h."""
    seconds = int(seconds + 0.5)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that lasts as long as the context; its value is called with (parts done, parts in all)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
