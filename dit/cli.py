"""How settings are read: a TOML file, then flags over it; and how every command reports a mistake in one line.

tyro is imported where flags are parsed, so that reading a config needs nothing beyond the standard library.
"""

import contextlib
import dataclasses
import io
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dit.config import SECTION_OF, SECTIONS, TrainConfig, UsageError, did_you_mean, replace


def load_toml(path: str | Path, base: TrainConfig | None = None) -> TrainConfig:
    """Read a TOML file of settings, one table per section. Raises UsageError naming file and key."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not valid TOML: {error}") from None
    return from_tree(tables, base or TrainConfig(), str(path))


def from_tree(tree: object, base: TrainConfig, source: str) -> TrainConfig:
    """Lay a tree of plain values, as in config.json or a TOML file, over ``base``. Raises UsageError."""
    if not isinstance(tree, dict):
        raise UsageError(f"{source}: must be a table of sections")
    changes: dict[str, object] = {}
    for section, table in tree.items():
        if section in SECTION_OF and not isinstance(table, dict):
            raise UsageError(f"{source}: {section} belongs under [{SECTION_OF[section]}]")
        if section not in SECTIONS or not isinstance(table, dict):
            raise UsageError(f"{source}: unknown section [{section}]; sections are {', '.join(SECTIONS)}")
        for key, value in table.items():
            if SECTION_OF.get(key) != section:
                known = [name for name, where in SECTION_OF.items() if where == section]
                raise UsageError(f"{source}: unknown key {section}.{key}{did_you_mean(key, known)}")
            changes[key] = _typed(value, typing.get_type_hints(SECTIONS[section])[key], f"{source}: {section}.{key}")
    return replace(base, **changes)


def _typed(value: object, kind: object, where: str) -> object:
    """``value`` as a setting of type ``kind``; integers pass for floats, lists for tuples, nothing else is converted."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            if isinstance(value, list | tuple) and len(value) == 2 and all(type(item) is int for item in value):
                return tuple(value)
        elif option is float and type(value) is int:
            return float(value)
        elif type(value) is option:
            return value
    names = [" or ".join(map(repr, typing.get_args(option))) if typing.get_origin(option) is Literal
             else "[height, width]" if typing.get_origin(option) is tuple else getattr(option, "__name__", str(option))
             for option in options if option is not type(None)]
    raise UsageError(f"{where} = {json.dumps(value, default=str)}: must be {' or '.join(names)}")


def to_tree(config: TrainConfig) -> dict[str, dict[str, object]]:
    """The config as plain values, as config.json and checkpoint files hold it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


# ---- flags ----

def parse_flags(cls: type, args: Sequence[str], default: object, *, prog: str) -> object:
    """Parse flags into the dataclass ``cls``, starting from ``default``.

    Returns an instance of ``cls``. ``--help`` prints and exits 0. Raises UsageError with tyro's message on one line.
    """
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[cls]], args=list(args),
                            default=default, prog=prog)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(said.getvalue())) from None


def take_flag(args: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Split ``--name VALUE`` or ``--name=VALUE`` off ``args``: (the last value given or None, the other arguments)."""
    value, rest, words = None, [], iter(args)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{name} needs a value")
        elif word.startswith(name + "="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return value, rest


def _one_line(box: str) -> str:
    """tyro's boxed error as one line: the message, then what was perhaps meant, without frame and help text."""
    lines = [line.strip("╭╮╰╯│─ \t") for line in box.splitlines() if line.strip("╭╮╰╯│─ \t")]
    title = lines.pop(0) if lines else ""
    message = " ".join(line for line in lines if not line.startswith("For full helptext")) or title
    meant = re.search(r"Perhaps you meant:? *(--[a-z0-9-]+)", message)
    message = message.split("Perhaps you meant")[0].strip()
    return message + (f"; did you mean {meant.group(1)}?" if meant else "")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command and exit: 0, what ``main`` returns, 2 with one line for a user's mistake, 130 after Ctrl-C."""
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
