"""Settings as files: the TOML that people write, and the tree of plain values in config.json and checkpoint files."""

import dataclasses
import json
import tomllib
import types
import typing
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
    """``value`` as a setting of type ``kind``; integers pass for floats, lists for tuples; no other conversion."""
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
