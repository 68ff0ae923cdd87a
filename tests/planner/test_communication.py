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
    # parameters gathered twice and gradients scattered once, in every micro-step
    assert communication.fsdp_bytes(XL, 8) == pytest.approx(3 * 7 / 8 * gradients)
    assert communication.fsdp_bytes(XL, 8, accumulation=4) == pytest.approx(4 * 3 * 7 / 8 * gradients)
    assert communication.fsdp_bytes(XL, 8, reshards=False) == pytest.approx(2 * 7 / 8 * gradients)
    assert communication.fsdp_bytes(XL, 8, parameter_bytes=2) == pytest.approx((0.5 * 2 + 1) * 7 / 8 * gradients)


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
