"""The trace of a step: exact at every micro-batch, complete, and found again in the cache without torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dit.config import TrainConfig, replace
from dit.planner import cache, flops
from dit.planner.trace import CATEGORIES, COLUMNS, PHASES, SYMBOL, Trace, trace_step
from dit.planner.tracing import record

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
SMALL = dict(data="synthetic", model="custom", depth=2, hidden_size=96, num_heads=2, patch_size=2, image_size=64)
AMP, CKPT = dict(amp=True), dict(ckpt=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_CACHE", str(tmp_path))


def small(**changes) -> TrainConfig:
    return replace(TrainConfig(), **(SMALL | changes))


def recorded(config: TrainConfig, micro_batch: int, kind: str = "cuda", dtype: str | None = None,
             attention: str = "efficient") -> Trace:
    return Trace({}, record(config, micro_batch, device_kind=kind, dtype=dtype, attention=attention),
                 config.memory.grad_accum)


@pytest.mark.parametrize("changes, kind, dtype, attention", [
    ({}, "cuda", None, "efficient"), (AMP | CKPT, "cuda", "bf16", "flash"),
    (dict(attention="math", amp=True, grad_accum=3, clip_grad=1.0, optimizer="adamw-foreach"), "cuda", "fp16", "math"),
    ({}, "cpu", None, "flash_cpu"), (AMP | CKPT | dict(ckpt_blocks=1), "cpu", "bf16", "flash_cpu"),
])
def test_every_micro_batch_is_exact_to_the_byte(changes, kind, dtype, attention):
    config = small(**changes)
    affine = recorded(config, SYMBOL, kind, dtype, attention)
    for micro_batch in (3, 7, 64):
        direct = recorded(config, micro_batch, kind, dtype, attention).at(micro_batch)
        derived = affine.at(micro_batch)
        for name in COLUMNS:
            assert np.array_equal(derived.events.columns[name], direct.events.columns[name]), (micro_batch, name)
        assert derived.events.spans == direct.events.spans
        assert derived.ops == direct.ops


def test_with_a_vae_in_the_loop_too(tmp_path):
    from check_memory import write_tiny_vae

    write_tiny_vae(tmp_path / "vae")
    config = small(data="folder", data_path="x", vae=str(tmp_path / "vae"), image_size=64)
    affine = recorded(config, SYMBOL).at(5)
    direct = recorded(config, 5).at(5)
    assert np.array_equal(affine.events.bytes, direct.events.bytes)
    encoded = affine.events.phase == PHASES.index("encode")
    assert encoded.sum() > 50 and set(affine.events.category[encoded]) <= {CATEGORIES.index("vae"),
                                                                         CATEGORIES.index("batch")}


def test_nothing_is_left_after_a_step_but_what_was_there_before():
    events = recorded(small(**AMP, **CKPT, grad_accum=2), 4, dtype="bf16", attention="flash").at(4).events
    levels = np.cumsum(events.bytes)
    ends = {step: stop for _, _, stop, step in events.spans}
    assert levels[ends[2] - 1] == levels[ends[3] - 1]
    tables = events.columns["category"] == CATEGORIES.index("other")  # of the schedule, made in the first step
    assert levels[-1] - levels[(events.step == 0).sum() - 1] == events.bytes[tables & (events.step > 0)].sum()


def test_categories_of_what_stays():
    config = small()
    events = recorded(config, 4).at(4).events
    parameters, trainable = flops.parameters(config.shape), flops.trainable_parameters(config.shape)

    def total(category: str, step: int) -> int:
        chosen = (events.category == CATEGORIES.index(category)) & (events.step == step) & (events.bytes > 0)
        return int(events.bytes[chosen].sum())

    assert total("parameters", 0) == 4 * parameters
    assert total("ema", 0) == 4 * trainable
    assert total("optimizer", 0) == 8 * trainable + 4 * (flops.state_dict_entries(config.shape) - 1)
    for step in (1, 2, 3):
        assert total("gradients", step) == 4 * trainable


def test_flops_are_those_of_the_closed_form():
    config = small()
    ops = recorded(config, SYMBOL).at(5).ops
    forward = sum(op.flops for op in ops if op.phase == "forward")
    assert forward == 5 * flops.forward_flops_per_image(config.shape)


def test_checkpointing_runs_the_blocks_again():
    ops = recorded(small(**CKPT), SYMBOL).at(3).ops
    again = [op for op in ops if op.recomputed]
    assert again and all(op.phase == "backward" and op.module.startswith("blocks.") for op in again)
    assert not any(op.recomputed for op in recorded(small(), SYMBOL).at(3).ops)


def test_accumulation_repeats_the_second_micro_step():
    two, five = (recorded(small(grad_accum=steps), SYMBOL).at(2).ops for steps in (2, 5))
    forward = [sum(op.flops for op in ops if op.phase == "forward") for ops in (two, five)]
    assert forward[1] * 2 == forward[0] * 5
    optimizer = [sum(op.bytes_written for op in ops if op.phase == "optimizer") for ops in (two, five)]
    assert optimizer[0] == optimizer[1]


def test_modules_are_known_in_the_backward_too():
    ops = recorded(small(), SYMBOL).at(2).ops
    products = [op for op in ops if op.phase == "backward" and op.flops]
    modules = {op.module for op in products}
    assert {"blocks.*.mlp.fc1", "blocks.*.attn.qkv", "blocks.*.attn", "final_layer.linear"} <= modules


def test_the_cache_gives_the_same_trace_and_needs_no_torch():
    config = small(**AMP)
    arguments = dict(device_kind="cuda", dtype="bf16", attention="flash", micro_batch=6)
    made = trace_step(config, **arguments)
    found = cache.load(made.request, 1)
    assert found.at(6).ops == made.at(6).ops
    for name in COLUMNS:
        assert np.array_equal(found.at(6).events.columns[name], made.at(6).events.columns[name])
    code = ("import sys; from dit.config import TrainConfig, replace; from dit.planner.trace import trace_step;"
            f"trace_step(replace(TrainConfig(), **{SMALL | AMP!r}), **{arguments!r}); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_broken_cache_file_is_made_again(tmp_path):
    config = small()
    arguments = dict(device_kind="cuda", dtype=None, attention="efficient", micro_batch=2)
    trace_step(config, **arguments)
    (path,) = (tmp_path / "traces").iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    assert trace_step(config, **arguments).at(2).ops


def test_other_settings_are_other_traces():
    arguments = dict(device_kind="cuda", dtype=None, attention="efficient", micro_batch=2)
    others = ({}, dict(depth=3), CKPT, dict(clip_grad=1.0), dict(ema="off"), dict(optimizer="adamw-foreach"))
    keys = {cache.key(trace_step(small(**changes), **arguments).request) for changes in others}
    assert len(keys) == 6
