"""Traces on disk, readable without torch, found again by what they were made from."""

import dataclasses
import functools
import hashlib
import io
import json
import os
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from dit.cache_folder import cache_folder as folder
from dit.planner.trace import COLUMNS, Events, Op, Recording, Trace

FORMAT = 2
_PACKAGE = Path(__file__).resolve().parents[1]
# What a step is made of. Another helper module of dit does not change a trace.
_SOURCES = ("codec.py", "config.py", "diffusion.py", "ema.py", "host_ema.py", "local_shards.py", "low_bit.py",
            "model.py", "optim.py", "sampling.py", "step.py", "planner/emulation.py", "planner/kernels.py",
            "planner/record.py", "planner/trace.py", "planner/tracing.py")


def key(request: dict[str, object]) -> str:
    """Name of a trace: a hash of the request, the code that makes traces, and the libraries' versions."""
    said = json.dumps([FORMAT, request, _code_hash(), [_version(name) for name in ("torch", "timm", "diffusers")]],
                      sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


@functools.cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = _PACKAGE / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def load(request: dict[str, object], accumulation: int) -> Trace | None:
    """The trace of a request, or None where there is none or its file cannot be read."""
    path = folder() / "traces" / f"{key(request)}.npz"
    try:
        with np.load(path) as data:
            meta = json.loads(data["meta"].tobytes())
            columns = {name: data[name] for name in COLUMNS}
            events = Events(columns, tuple(meta["modules"]), tuple(map(tuple, meta["spans"])))
            recording = Recording(meta["micro_batch"], events, tuple(map(_op, meta["ops"])), data["op_sequence"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return Trace(request, recording, accumulation)


def _op(values: list) -> Op:
    values[4], values[5] = tuple(map(tuple, values[4])), tuple(map(tuple, values[5]))
    return Op(*values)


def save(trace: Trace) -> None:
    """Keep a trace. A cache that cannot be written is no error: the next plan takes longer."""
    recording, events = trace.recording, trace.recording.events
    meta = {"micro_batch": recording.micro_batch, "modules": events.modules, "spans": events.spans,
            "request": trace.request,
            "ops": [[getattr(op, f.name) for f in dataclasses.fields(Op)] for op in recording.op_table]}
    buffer = io.BytesIO()
    np.savez(buffer, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), op_sequence=recording.op_sequence,
             **events.columns)
    path = folder() / "traces" / f"{key(trace.request)}.npz"
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(buffer.getvalue())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
