"""Bytes and seconds of gradient exchange: closed forms, their limits, and DDP's own buckets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit.config import TrainConfig, replace
from dit.planner import communication, flops
from dit.planner.calibration import PRIORS
from dit.planner.catalogue import NODES, NVLINK3, PCIE3
from dit.planner.hardware import find_device, find_node

XL = replace(TrainConfig(), data="synthetic").shape
A100, NODE = find_device("A100-SXM4-80GB"), find_node("hgx-a100")


def plan(num_devices, backward_seconds, device=A100, node=NODE, config=None):
    config = config or replace(TrainConfig(), data="synthetic")
    return communication.plan_ddp(config, device, num_devices, node, backward_seconds=backward_seconds,
                                  calibration=PRIORS)


def test_bytes_of_ddp_and_fsdp_are_the_closed_forms():
    gradients = 4 * flops.trainable_parameters(XL)
    assert communication.gradient_bytes(XL) == gradients == 4 * 674_834_720
    assert communication.ddp_bytes(XL, 8) == 2 * 7 / 8 * gradients
    assert communication.ddp_bytes(XL, 1) == 0


def test_bytes_of_fsdp_are_the_closed_form():
    gradients = 4 * flops.trainable_parameters(XL)
    block, others = flops.block_parameters(XL)
    assert 28 * block + others == flops.parameters(XL) == 675_129_632
    # blocks gathered twice per micro-step, what is around them once; gradients scattered once per step
    once = 7 / 8 * (2 * 28 * block * 4 + 4 * others)
    assert communication.fsdp_bytes(XL, 8) == pytest.approx(once + 7 / 8 * gradients)
    assert communication.fsdp_bytes(XL, 8) == pytest.approx(3 * 7 / 8 * gradients, rel=0.005), "1.5 times DDP's"
    assert communication.fsdp_bytes(XL, 8, accumulation=4) == pytest.approx(4 * once + 7 / 8 * gradients)
    half = 7 / 8 * (2 * 28 * block * 2 + 4 * others)
    assert communication.fsdp_bytes(XL, 8, weight_bytes=2) == pytest.approx(half + 7 / 8 * gradients)
    # groups of 8 among 32: inside as with 8, then the eighths are all-reduced among 4
    hybrid = communication.fsdp_bytes(XL, 32, shard_size=8)
    assert hybrid == pytest.approx(communication.fsdp_bytes(XL, 8) + 2 * 3 / 4 * gradients / 8)
    assert communication.fsdp_bytes(XL, 8, shard_size=1) == pytest.approx(communication.ddp_bytes(XL, 8))


def test_buckets_hold_every_gradient_once_and_number_about_what_ddp_makes():
    from torch.distributed import _compute_bucket_assignment_by_size as assign

    from dit.config import PRESETS, ModelShape
    from dit.model import build_model

    shape = ModelShape(input_size=(32, 32), in_channels=4, num_classes=1000, **PRESETS["DiT-S/2"])
    sizes = communication.buckets(shape)
    assert sum(sizes) == communication.gradient_bytes(shape)
    assert sizes[0] == 1 << 20 and max(sizes) == 25 << 20
    trained = [parameter for parameter in build_model(shape).parameters() if parameter.requires_grad]
    theirs = assign(list(reversed(trained)), [1 << 20, 25 << 20], [False] * len(trained))[0]
    assert abs(len(theirs) - len(sizes)) <= 2


def test_a_ring_of_two_moves_each_byte_once_at_the_links_rate():
    seconds = communication.all_reduce_seconds(1e9, 2, NVLINK3)
    at_rate = 1e9 / (NVLINK3.bytes_per_second * communication.LINK_EFFICIENCY)
    assert seconds == pytest.approx(at_rate + 2 * NVLINK3.latency_seconds, rel=1e-6)


@given(st.floats(1e3, 1e10), st.sampled_from([2, 4, 8, 16, 64, 1024]), st.sampled_from(sorted(NODES)))
def test_more_bytes_or_more_nodes_never_take_less(num_bytes, devices, name):
    node = NODES[name]
    seconds = communication.all_reduce_seconds(num_bytes, devices, node.link, node)
    assert 0 < seconds <= communication.all_reduce_seconds(2 * num_bytes, devices, node.link, node)
    assert seconds <= communication.all_reduce_seconds(num_bytes, 2 * devices, node.link, node) * (1 + 1e-9)


def test_small_messages_cost_hops_and_a_tree_needs_fewer():
    few = communication.all_reduce_seconds(1.0, 8, PCIE3)
    assert few == pytest.approx(2 * 3 * PCIE3.latency_seconds, rel=1e-3)


@given(st.lists(st.floats(1, 1e8), min_size=1, max_size=40), st.floats(0, 10), st.floats(1e-9, 1e-6))
def test_overlap_agrees_with_a_fine_clock(sizes, backward, cost):
    seconds = [cost * size for size in sizes]
    exposed = communication.overlapped(sizes, seconds, backward)
    ready, free = 0.0, 0.0
    for size, each in zip(sizes, seconds, strict=True):
        ready += size / sum(sizes) * backward
        free = (free if free > ready else ready) + each
    assert exposed == pytest.approx(free - backward, rel=1e-6, abs=1e-9)
    assert seconds[-1] * (1 - 1e-6) - 1e-9 <= exposed <= sum(seconds) * (1 + 1e-6) + 1e-9


def test_without_a_backward_everything_shows_and_a_long_one_hides_all_but_the_last_bucket():
    assert plan(8, 0.0).exposed_seconds == pytest.approx(plan(8, 0.0).seconds)
    hidden = plan(8, 10.0)
    last = communication.buckets(XL)[-1]
    assert hidden.exposed_seconds == pytest.approx(communication.all_reduce_seconds(last, 8, A100.link, NODE))
    assert plan(1, 1.0) == communication.NOTHING


def test_a_slow_link_shows_where_a_fast_one_does_not():
    slow = find_device("RTX-3090")
    box = find_node("pcie4-box")
    assert plan(8, 0.2).exposed_seconds < 0.02 < plan(8, 0.2, slow, box).exposed_seconds
    assert plan(64, 0.2, slow, box).exposed_seconds > plan(8, 0.2, slow, box).exposed_seconds


def test_gloo_on_a_cpu_is_not_hidden():
    from dit.planner.hardware import cpu_device

    exchange = plan(2, 10.0, cpu_device(), None)
    assert exchange.exposed_seconds == exchange.seconds > 0
    assert math.isclose(exchange.bytes_sent, communication.gradient_bytes(XL))


# ---- FSDP ----

def fsdp(num_devices, forward=1.0, backward=2.0, device=A100, node=NODE, **changes):
    config = replace(TrainConfig(), data="synthetic", parallel="fsdp", **changes)
    return communication.plan_fsdp(config, device, num_devices, node, forward_seconds=forward,
                                   backward_seconds=backward, calibration=PRIORS)


def test_one_device_exchanges_nothing_under_fsdp_and_bytes_are_those_counted():
    assert fsdp(1) == communication.NOTHING
    assert fsdp(8).bytes_sent == communication.fsdp_bytes(XL, 8)
    assert fsdp(8, amp=True, grad_accum=4).bytes_sent == communication.fsdp_bytes(XL, 8, 4, weight_bytes=2)
    assert fsdp(32, shard_size=8).bytes_sent == communication.fsdp_bytes(XL, 32, shard_size=8)
    rate = A100.link.bytes_per_second * communication.LINK_EFFICIENCY
    hops = (2 * 28 + 1 + 28 + 1) * 7  # of every gather and scatter
    expected = communication.fsdp_bytes(XL, 8) / rate + hops * A100.link.latency_seconds
    assert fsdp(8).seconds == pytest.approx(expected, rel=1e-6)


def test_gathers_hide_behind_long_blocks_and_show_without_them():
    block, others = flops.block_parameters(XL)
    hidden, bare = fsdp(8, 100.0, 200.0), fsdp(8, 0.0, 0.0)
    first = communication.gather_seconds(4 * others, 8, A100.link, NODE)
    one = communication.gather_seconds(4 * block, 8, A100.link, NODE)
    assert hidden.exposed_forward_seconds == pytest.approx(first + one)  # nothing runs beside the first two
    trained = 4 * (flops.trainable_parameters(XL) - 28 * block)
    left = one + one + communication.gather_seconds(trained, 8, A100.link, NODE)  # first gather, last two sums
    assert hidden.exposed_seconds - hidden.exposed_forward_seconds == pytest.approx(left)
    assert bare.exposed_seconds == pytest.approx(bare.seconds)


@given(st.integers(2, 40), st.floats(0, 3), st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.1))
def test_overlap_of_fsdp_lies_between_its_bounds(blocks, compute, gather, scatter, between):
    forward = communication.prefetched(0.0, [gather] * blocks, compute)
    assert max(gather, blocks * gather - compute) - 1e-9 <= forward <= blocks * gather + 1e-9
    if compute / blocks >= gather:
        assert forward == pytest.approx(gather, abs=1e-9), "a block that lasts longer hides the next gather"
    backward = communication.backward_overlapped([gather] * blocks, [(scatter, between)] * blocks, (0, 0), compute)
    on_link = blocks * (gather + scatter)
    assert max(gather + scatter + between, on_link - compute) - 1e-9 <= backward
    assert backward <= on_link + blocks * between + 1e-9
    longer = communication.backward_overlapped([gather] * blocks, [(2 * scatter, between)] * blocks, (0, 0), compute)
    assert longer >= backward - 1e-9


def test_accumulation_gathers_in_every_micro_step_and_scatters_once():
    block, others = flops.block_parameters(XL)
    gathers = communication.gather_seconds(4 * others, 8, A100.link, NODE) + 56 * communication.gather_seconds(
        4 * block, 8, A100.link, NODE)
    assert fsdp(8, grad_accum=3).seconds - fsdp(8).seconds == pytest.approx(2 * gathers)
    assert fsdp(8, grad_accum=3).exposed_seconds > fsdp(8).exposed_seconds


def test_half_the_bytes_under_amp_and_hybrid_sharding_spares_the_network():
    assert fsdp(8, amp=True).seconds < 0.75 * fsdp(8).seconds
    whole, within = fsdp(1024, 0.3, 0.6), fsdp(1024, 0.3, 0.6, shard_size=8)
    assert within.seconds < 0.3 * whole.seconds, "gathers of a group pass no network and few hops"
    assert within.exposed_seconds < whole.exposed_seconds


def test_shards_that_do_not_divide_are_refused_in_one_line():
    from dit.config import UsageError

    with pytest.raises(UsageError, match="--shard-size 3 does not divide the 8 devices"):
        fsdp(8, shard_size=3)
    config = replace(TrainConfig(), parallel="fsdp", shard_size=3)
    with pytest.raises(UsageError, match="--shard-size 3 does not divide the 8 devices"):
        communication.shard_size(config, 8)
    assert communication.shard_size(replace(config, shard_size=4), 8) == 4
    assert communication.shard_size(replace(TrainConfig(), parallel="ddp"), 8) == 1


@given(st.floats(1e3, 1e10), st.sampled_from([2, 4, 8, 16, 64, 512]), st.sampled_from(sorted(NODES)))
def test_more_to_gather_or_more_devices_never_takes_less(num_bytes, devices, name):
    node = NODES[name]
    seconds = communication.gather_seconds(num_bytes, devices, node.link, node)
    assert 0 < seconds <= communication.gather_seconds(2 * num_bytes, devices, node.link, node)
    assert seconds <= communication.gather_seconds(num_bytes, 2 * devices, node.link, node) * (1 + 1e-9)
    assert seconds <= communication.all_reduce_seconds(num_bytes, devices, node.link, node) + 2 * devices * 14e-6
    copies = communication.copies_seconds(num_bytes, 8 * devices, 8, node.link, node)
    assert 0 < copies <= communication.copies_seconds(num_bytes, 16 * devices, 8, node.link, node) * (1 + 1e-9)


def test_gloo_counts_fsdps_messages():
    from dit.planner.hardware import cpu_device

    exchange = fsdp(2, 1.0, 2.0, cpu_device(), None)
    assert exchange.exposed_seconds == exchange.seconds
    hops = 2 * 28 + 1 + 29
    expected = exchange.bytes_sent / communication.GLOO_BYTES_PER_SECOND + hops * communication.GLOO_LATENCY_SECONDS
    assert exchange.seconds == pytest.approx(expected)
