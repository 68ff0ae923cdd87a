"""Memory plans: equal to real training on this CPU, right about public runs, consistent in themselves, and monotone."""

import csv
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dit.codec import build_codec
from dit.config import TrainConfig, replace
from dit.planner import memory_of, traced
from dit.planner.allocator import simulate
from dit.planner.catalogue import GIB
from dit.planner.emulation import MetaPrecision, MetaScaler
from dit.planner.hardware import cpu_device, custom_device, find_device
from dit.planner.kernels import internals, replacements
from dit.planner.memory import plan_memory, rounded, summarize
from dit.planner.record import Recorder
from dit.planner.spread import Shards, with_buckets, with_shards
from dit.planner.trace import CATEGORIES, PHASES, Events
from dit.saving import named_tensors, state_of
from dit.step import build_parts

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from check_memory import CONFIGURATIONS, PEAK_TOLERANCE, PHASE_TOLERANCE, check, settings, write_tiny_vae  # noqa: E402
from check_public import PUBLIC, published  # noqa: E402

SMALL = dict(data="synthetic", model="custom", depth=3, hidden_size=192, num_heads=3, patch_size=2, image_size=128)
pytestmark = pytest.mark.usefixtures("own_cache")
A100 = find_device("A100-SXM4-80GB")
QUICK = ["fp32, batch 2", "ckpt 1 of 3", "accumulation 3", "foreach", "clip", "no average", "fixed variance",
         "math attention", "digits ckpt", "VAE", "VAE by 3", "bf16, batch 1", "8 bits", "average on the host",
         "samples of pixels", "samples by the VAE in the loop"]


def small(**changes) -> TrainConfig:
    return replace(TrainConfig(), **(SMALL | changes))


def step_of(config: TrainConfig, micro_batch: int = 16, device=A100):
    return traced(config, device, micro_batch).at(micro_batch)


def plan_of(config: TrainConfig, micro_batch: int = 16, device=A100, num_devices: int = 1):
    return memory_of(config, device, num_devices, step_of(config, micro_batch, device))


# ---- against real training ----

@pytest.mark.parametrize("name", QUICK)
def test_planned_bytes_are_those_of_real_steps(name, tmp_path):
    if "bits" in name:
        pytest.importorskip("torchao")
    write_tiny_vae(tmp_path)
    result = check(name, *settings(name, tmp_path))
    assert result.ratio == pytest.approx(1, abs=PEAK_TOLERANCE)
    phase, ratio = result.worst_phase
    assert ratio == pytest.approx(1, abs=PHASE_TOLERANCE), phase
    drawn = {"sample"} if name.startswith("samples") else set()
    assert {"data", "encode", "forward", "backward", "optimizer", "ema"} | drawn == set(result.measured_phases)


def test_the_whole_matrix_has_forty_configurations():
    assert len(CONFIGURATIONS) >= 40 and set(QUICK) <= set(CONFIGURATIONS)


def test_public_runs():
    """What others have published, planned with their settings."""
    with open(PUBLIC, newline="", encoding="utf-8") as file:
        runs = {run.name: run for run in published(list(csv.DictReader(file)))}
    assert runs["FD-R1"].plan.verdict == "does_not_fit"
    assert runs["FD-M6"].plan.verdict == "fits"
    assert runs["G3-1"].plan.verdict == "fits"
    for name in ("FD-R2", "FD-R3", "FD-R4"):
        assert runs[name].is_inside
        assert runs[name].plan.device_used_bytes["mid"] == pytest.approx(runs[name].memory_bytes, rel=0.10)


# ---- consistent ----

def test_the_split_sums_to_the_peak_which_is_the_allocators():
    config = small(amp=True)
    step = step_of(config)
    plan = plan_memory(step, A100)
    assert sum(plan.by_category.values()) == plan.peak_allocated_bytes
    assert plan.peak_allocated_bytes == max(plan.by_phase.values()) == plan.by_phase[plan.peak_phase]
    assert plan.peak_allocated_bytes <= plan.peak_reserved_bytes <= plan.device_used_bytes["mid"]
    assert plan.device_used_bytes["low"] <= plan.device_used_bytes["mid"] <= plan.device_used_bytes["high"]
    replayed = simulate(np.stack([step.events.tensor, step.events.bytes], axis=1))
    assert replayed.peak_allocated_bytes == summarize(step.events, rounded(step.events.bytes))["peak_allocated_bytes"]


def test_contributors_are_the_largest_and_part_of_the_peak():
    plan = plan_of(small())
    sizes = [each.bytes for each in plan.contributors]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 10
    for category in {each.category for each in plan.contributors}:
        assert sum(each.bytes for each in plan.contributors if each.category == category) <= plan.by_category[category]


def test_processes_of_a_cpu_share_its_memory():
    alone = plan_of(small(), device=cpu_device())
    need = alone.device_used_bytes["high"]
    machine = dataclasses.replace(cpu_device(), memory_bytes=int(1.5 * need))
    assert plan_of(small(), device=machine).verdict == "fits"
    both = plan_of(small(), device=machine, num_devices=2)
    assert both.verdict != "fits" and need <= both.device_used_bytes["high"] < 1.5 * need


def test_a_cpu_counts_bytes_and_has_no_reserved_memory():
    plan = plan_of(small(), 4, cpu_device())
    assert plan.peak_reserved_bytes is None and plan.peak_allocated_bytes % 512


@pytest.mark.parametrize("share, verdict", [(1.02, "fits"), (0.9, "does_not_fit")])
def test_the_verdict_follows_the_devices_memory(share, verdict):
    config = small()
    plan = plan_of(config)
    end = "high" if share > 1 else "low"
    memory = int(plan.device_used_bytes[end] * share)
    assert plan_of(config, device=dataclasses.replace(A100, memory_bytes=memory)).verdict == verdict


def test_between_mid_and_high_it_is_tight():
    config = small()
    used = plan_of(config).device_used_bytes
    middle = dataclasses.replace(A100, memory_bytes=(used["mid"] + used["high"]) // 2)
    assert plan_of(config, device=middle).verdict == "tight"


def test_where_it_runs_out_is_named():
    plan = plan_of(small(), 512, custom_device(GIB))
    assert plan.verdict == "does_not_fit" and plan.oom_phase in PHASES


# ---- samples, moments and averages ----

def drawing(**changes) -> TrainConfig:
    return small(**dict(vae="none", image_size=32, sample_every=10) | changes)


def test_samples_are_a_phase_of_runs_that_draw_them_and_change_no_other():
    without, with_them = plan_of(drawing(sample_every=0), 2), plan_of(drawing(), 2)
    assert "sample" not in without.by_phase
    assert with_them.by_phase["sample"] > with_them.by_phase["save"]
    assert {name: size for name, size in with_them.by_phase.items() if name != "sample"} == without.by_phase
    assert step_of(drawing(), 2).ops == step_of(drawing(sample_every=0), 2).ops


def test_samples_can_be_the_peak_and_do_not_depend_on_the_micro_batch():
    plans = [plan_of(drawing(image_size=128, depth=1, attention="math", num_classes=10), batch) for batch in (2, 3)]
    assert plans[0].peak_phase == "sample" and plans[0].peak_allocated_bytes == plans[0].by_phase["sample"]
    assert plans[0].by_phase["sample"] == plans[1].by_phase["sample"]


def test_the_vae_that_decodes_is_there_all_the_time(tmp_path):
    write_tiny_vae(tmp_path)
    latents = [plan_of(drawing(image_size=128, vae=str(tmp_path), sample_every=every), 2) for every in (0, 10)]
    assert latents[0].by_category["vae"] == 0 < latents[1].by_category["vae"]
    assert latents[1].by_phase["save"] - latents[0].by_phase["save"] == latents[1].by_category["vae"]


def test_a_save_makes_no_copies_on_the_device():
    """What a checkpoint file is made of are the live tensors, which go to the host as they are."""
    meta, config = torch.device("meta"), small(depth=1)
    scaler = MetaScaler(False, meta)
    scaler.state_dict = dict
    with Recorder(internals("cuda"), replacements("cuda")) as recorder:
        parts = build_parts(config, meta, build_codec("none"), MetaPrecision(None, scaler))
        before = len(recorder.finish(1).events)
        copies = [tensor.to("cpu") for _, tensor in named_tensors(state_of(config, parts, 1)) if tensor.is_meta]
        assert len(copies) > 100 and len(recorder.finish(1).events) == before


@pytest.mark.parametrize("optimizer, bytes_each", [("adamw-8bit", 2 + 8 / 256), ("adamw-4bit", 1 + 8 / 128)])
def test_low_bit_moments_and_an_average_on_the_host_are_saved_on_a_gpu(optimizer, bytes_each):
    wide = dict(hidden_size=768, num_heads=12, image_size=32)
    whole, less = plan_of(small(**wide), 2), plan_of(small(**wide, optimizer=optimizer, ema="host"), 2)
    assert less.by_category["optimizer"] / whole.by_category["optimizer"] == pytest.approx(bytes_each / 8, rel=0.03)
    assert less.by_category["ema"] == 0 < whole.by_category["ema"]


# ---- DDP ----

def test_buckets_hold_every_gradient_once():
    config = small()
    alone, shared = plan_of(config), plan_of(config, num_devices=8)
    trainable = alone.by_category["parameters"]
    assert alone.by_phase["save"] < shared.by_phase["save"]
    added = shared.by_phase["save"] - alone.by_phase["save"]
    assert 0.9 * trainable < added <= trainable


def test_gradients_beside_their_buckets_take_as_much_again():
    events = step_of(small(), 2).events
    views, copies = (with_buckets(events, are_views) for are_views in (True, False))
    peak = [int(np.cumsum(each.bytes)[each.category.size - 1]) for each in (views, copies)]
    assert peak[0] == peak[1]  # after the step both have the buckets alone
    highest = [summarize(each, each.bytes)["by_phase"]["optimizer"] for each in (views, copies)]
    gradients = int(events.bytes[(events.category == CATEGORIES.index("gradients")) & (events.step == 1)
                                 & (events.bytes > 0)].sum())
    assert highest[1] - highest[0] == gradients


@pytest.mark.parametrize("are_views", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_buckets_leave_a_valid_sequence(are_views, accumulation):
    is_valid(with_buckets(step_of(small(grad_accum=accumulation), 2).events, are_views))


def is_valid(events: Events) -> None:
    """Nothing is taken twice or given back twice, and what a phase's span takes is of that phase."""
    alive = set()
    for tensor, size in zip(events.tensor.tolist(), events.bytes.tolist()):
        if size > 0:
            assert tensor not in alive
            alive.add(tensor)
        else:
            alive.remove(tensor)
    assert (np.cumsum(events.bytes) >= 0).all()
    for phase, start, stop, _ in events.spans:
        taken = events.bytes[start:stop] > 0
        assert set(events.phase[start:stop][taken].tolist()) <= {phase, PHASES.index("build")}


# ---- FSDP ----

def test_shards_hold_a_share_of_what_stays():
    config = small(parallel="fsdp")
    whole = step_of(config, 2).events
    shares = with_shards(whole, Shards.of(config.shape, 8, 4))
    for name in ("parameters", "optimizer", "ema"):
        held = [int(events.bytes[(events.category == CATEGORIES.index(name)) & (events.step == 0)].sum())
                for events in (whole, shares)]
        assert held[0] / 8 <= held[1] < held[0] / 8 + 8 * 200
    across = replace(config, shard_size=2)
    assert plan_of(across, num_devices=8).peak_allocated_bytes == plan_of(config, num_devices=2).peak_allocated_bytes


def test_whole_gradients_live_through_an_accumulation():
    plans = [plan_of(small(parallel="fsdp", grad_accum=steps), 1, num_devices=8) for steps in (1, 2)]
    peaks = [plan.by_phase["backward"] for plan in plans]
    trainable = plan_of(small()).by_category["parameters"]
    assert peaks[1] - peaks[0] == pytest.approx(trainable, rel=0.1)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_shards_leave_a_valid_sequence(accumulation):
    config = drawing(grad_accum=accumulation, amp=True, ckpt=True)
    events = with_shards(step_of(config, 2).events, Shards.of(config.shape, 4, 2))
    is_valid(events)
    levels = np.cumsum(events.bytes)
    ends = {step: stop for phase, _, stop, step in events.spans if PHASES[phase] == "ema"}
    assert levels[ends[2] - 1] == levels[ends[3] - 1]


# ---- monotone ----

def test_more_images_never_need_less():
    for changes in ({}, dict(amp=True, ckpt=True)):
        peaks = [plan_of(small(**changes), micro_batch).peak_allocated_bytes for micro_batch in (1, 2, 3, 8, 64, 512)]
        assert peaks == sorted(peaks)


def test_more_blocks_never_need_less():
    peaks = [plan_of(small(depth=depth)).peak_allocated_bytes for depth in (1, 2, 3, 5)]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("changes", [{}, dict(amp=True), dict(ckpt=True), dict(amp=True, ckpt=True),
                                     dict(grad_accum=2, global_batch_size=64), dict(clip_grad=1.0)])
def test_two_and_three_blocks_foretell_seven_to_the_byte_and_the_operation(changes):
    """Blocks are alike, which the planner's note on what AMP costs relies on."""
    found = {}
    for depth in (2, 3, 7):
        step = step_of(small(depth=depth, **(dict(global_batch_size=32) | changes)), 32)
        found[depth] = np.array([np.cumsum(step.events.bytes).max(), sum(op.flops for op in step.ops)])
    assert (found[7] == found[2] + 5 * (found[3] - found[2])).all()


def test_less_checkpointing_never_needs_less():
    plans = [plan_of(small(ckpt=True, ckpt_blocks=blocks), 64) for blocks in (3, 2, 1)] + [plan_of(small(), 64)]
    peaks = [plan.peak_allocated_bytes for plan in plans]
    assert peaks == sorted(peaks) and peaks[0] < 0.7 * peaks[-1]


PRESETS = [dict(model="DiT-S/4"), dict(model="DiT-XL/2", amp=True, ckpt=True)]


def preset(**changes) -> TrainConfig:
    return replace(TrainConfig(), data="synthetic", **changes)


def never_less(plans, at_least: float = 1.0) -> None:
    for before, after in zip(plans, plans[1:]):
        for end in ("low", "mid", "high"):
            assert after.device_used_bytes[end] >= at_least * before.device_used_bytes[end], end
        assert after.peak_allocated_bytes >= at_least * before.peak_allocated_bytes


@pytest.mark.parametrize("changes", [PRESETS[0], PRESETS[1] | dict(depth=5)])
def test_more_images_never_need_more_than_yet_more_on_a_device(changes):
    """The allocator's replay falls here and there (asserted, or this would test nothing); what is needed does not."""
    config, batches = preset(**changes), (*range(2, 34), 37, 41, 48, 50, 57, 63, 64)
    trace = traced(config, A100, 2)
    plans = [memory_of(config, A100, 1, trace.at(batch)) for batch in batches]
    never_less([plan_of(config, 1), *plans])
    replayed = [plan.peak_reserved_bytes for plan in plans]
    assert replayed != sorted(replayed)
    ratios = [(plan.device_used_bytes["mid"] - A100.context_bytes[1]) / plan.peak_reserved_bytes for plan in plans]
    assert min(ratios) > 0.85 and max(ratios) < 1.1 and sorted(ratios)[len(ratios) // 2] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("changes", PRESETS)
@pytest.mark.parametrize("batch", [2, 6, 32])
def test_more_blocks_never_need_less_on_a_device(changes, batch):
    never_less([plan_of(preset(**changes, depth=depth), batch) for depth in (1, 2, 3, 5)])


@pytest.mark.parametrize("changes", [PRESETS[0] | dict(depth=4), PRESETS[1] | dict(depth=4)])
@pytest.mark.parametrize("batch", [2, 6, 32])
def test_less_checkpointing_never_needs_less_on_a_device(changes, batch):
    config = preset(**changes | dict(ckpt=True))
    fewer = [replace(config, ckpt_blocks=blocks) for blocks in (4, 3, 2, 1)] + [replace(config, ckpt=False)]
    never_less([plan_of(each, batch) for each in fewer], at_least=0.995)  # the last block's input, kept for nothing


def test_mixed_precision_saves_at_a_large_batch_and_costs_at_a_small_one():
    """Weights are cast once per forward, 2 bytes each, which few images do not win back."""
    wide = dict(hidden_size=768, num_heads=12, image_size=32, ema="off")
    small_batch = [plan_of(small(**wide, amp=amp), 2).by_phase["forward"] for amp in (False, True)]
    large_batch = [plan_of(small(**wide, amp=amp), 512).by_phase["forward"] for amp in (False, True)]
    assert small_batch[1] > small_batch[0]
    assert large_batch[1] < large_batch[0]
