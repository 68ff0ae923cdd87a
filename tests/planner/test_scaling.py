"""Scaling over devices: what stays fixed stays fixed, figures are those of single plans, and limits are said."""

import dataclasses

import pytest

from dit.config import TrainConfig, UsageError, replace
from dit.planner import plan
from dit.planner.costs import Costs
from dit.planner.hardware import cpu_device, find_device, find_node
from dit.planner.scaling import COUNTS, SHOWS_FROM, scaling
from dit.planner.tables import scaling_rows

A100, CARD = find_device("A100-SXM4-80GB"), find_device("RTX-4090")
CONFIG = replace(TrainConfig(), model="custom", hidden_size=512, depth=4, num_heads=8, patch_size=2, data="synthetic",
                 global_batch_size=256, amp=True)
COSTS = Costs()


def scale(config=CONFIG, device=A100, **kwargs):
    return scaling(config, device, 100_000, costs=COSTS, **kwargs)


def test_strong_scaling_keeps_the_batch_and_weak_scaling_the_micro_batch():
    found = scale()
    assert [each.num_devices for each in found.strong] == list(COUNTS)
    for each in found.strong:
        assert each.global_batch == 256
        assert each.micro_batch is None or each.micro_batch * each.accumulation * each.num_devices == 256
    assert [each.micro_batch for each in found.strong] == [256, 128, 64, 32, 16, 8, 4, 2, 1, None, None]
    for each in found.weak:
        assert (each.micro_batch, each.global_batch) == (256, 256 * each.num_devices)
    at_eight = scale(num_devices=8)
    assert {each.micro_batch for each in at_eight.weak} == {32}


def test_a_row_is_what_a_plan_of_its_own_says():
    eight = scale(price=2.0).strong[3]
    content = plan(CONFIG, A100, 8, price_per_device_hour=2.0).to_dict()
    assert eight.step_seconds == pytest.approx(content["time"]["step_seconds"]["mid"])
    assert eight.images_per_second == pytest.approx(content["time"]["images_per_second"])
    assert eight.verdict == content["memory"]["verdict"]
    assert eight.hours == pytest.approx(eight.step_seconds * 100_000 / 3600)
    assert eight.cost == pytest.approx(eight.hours * 8 * 2.0)
    assert eight.energy_kwh == pytest.approx(eight.hours * 8 * 0.4)
    one = scale().strong[0]
    assert eight.speed_up == pytest.approx(eight.images_per_second / one.images_per_second)
    assert eight.efficiency == pytest.approx(eight.speed_up / 8)
    assert one.speed_up == one.efficiency == 1.0 and one.exposed_share == 0 and one.cost is None


def test_more_devices_never_gain_more_than_their_number_and_weak_scaling_loses_less():
    found = scale(device=CARD)
    for each in found.weak:
        assert each.efficiency <= 1 + 1e-9
    strong, weak = ({each.num_devices: each for each in points} for points in (found.strong, found.weak))
    for count in (8, 64, 256):
        assert weak[count].efficiency > strong[count].efficiency
        assert weak[count].exposed_share < strong[count].exposed_share
    # weak scaling: as many images in all, so as many hours as throughput says
    assert weak[8].hours == pytest.approx(256 * 100_000 / weak[8].images_per_second / 3600, rel=1e-3)


def test_it_is_said_from_where_communication_shows_and_where_the_batch_ends():
    found = scale(device=CARD)
    first = next(each for each in found.strong if (each.exposed_share or 0) > SHOWS_FROM)
    said = " ".join(found.notes)
    assert f"Communication shows (same global batch) from {first.num_devices:,} devices on" in said
    assert "From 512 devices on a global batch of 256 does not divide" in said and "a multiple of 512" in said
    assert f"8 devices give {found.strong[3].speed_up:.1f}x" in said
    slow = scale(replace(CONFIG, depth=1, hidden_size=64, num_heads=2, global_batch_size=1 << 20))
    assert "Communication does not show (same global batch)" in " ".join(slow.notes)


def test_accumulation_shrinks_before_images_are_cut():
    found = scale(replace(CONFIG, grad_accum=8))
    assert [(each.micro_batch, each.accumulation) for each in found.strong[4:10]] == [
        (2, 8), (1, 8), (1, 4), (1, 2), (1, 1), (None, None)]
    odd = scale(replace(CONFIG, global_batch_size=192, grad_accum=4))
    assert [(each.micro_batch, each.accumulation) for each in odd.strong[5:8]] == [(2, 3), (1, 3), (None, None)]


def test_machines_are_named_and_can_be_chosen():
    assert scale().node.startswith("128 hgx-a100 nodes of 8 devices, NVLink 3 inside")
    assert [each.num_nodes for each in scale().strong][:5] == [1, 1, 1, 1, 2]
    box = scale(node=find_node("pcie4-box"))
    assert "pcie4-box" in box.node
    assert box.strong[3].exposed_share > scale().strong[3].exposed_share


def test_fsdp_groups_no_larger_than_the_devices():
    found = scale(replace(CONFIG, parallel="fsdp", shard_size=8))
    assert all(each.step_seconds for each in found.strong[:9])
    assert found.strong[4].exposed_share > 0


def test_what_is_unknown_is_said():
    with pytest.raises(UsageError, match="--scaling: what machines CPU"):
        scale(device=cpu_device())
    assert "--compile is not modelled" in " ".join(scale(replace(CONFIG, compile=True)).notes)
    two = scale(replace(CONFIG, tensor_parallel=2))
    assert two.strong[0].num_devices == 2 and "--tensor-parallel is not modelled" in " ".join(two.notes)


def test_rows_for_people_have_a_cell_for_every_column():
    for points in (scale().strong, scale().weak):
        header, *rows = scaling_rows(points)
        assert len(rows) == len(points) and all(len(row) == len(header) for row in rows)
    assert scaling_rows(scale().strong)[-1][3] == "less than 1"
    assert scale().to_dict()["strong"][3] == dataclasses.asdict(scale().strong[3])
