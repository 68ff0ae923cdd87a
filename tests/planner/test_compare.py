"""Predicted against measured."""

import pytest

from dit.planner.compare import compare, row, verdict

PLAN = {
    "config": {"memory": {"global_batch_size": 32}},
    "memory": {"peak_allocated_bytes": 1000, "peak_reserved_bytes": None,
               "device_used_bytes": {"low": 900, "mid": 1100, "high": 1500}},
    "time": {"step_seconds": {"low": 0.08, "mid": 0.1, "high": 0.125}, "images_per_second": 320.0, "mfu": 0.4},
    "disk": {"checkpoint_bytes": 500},
}


def rows_of(**measured):
    return {each.quantity: each for each in compare(PLAN, measured)}


def test_inside_the_interval_is_within_and_outside_is_not():
    assert rows_of(step_seconds=0.124)["step_seconds"].within is True
    assert rows_of(step_seconds=0.126)["step_seconds"].within is False
    assert rows_of(peak_allocated_bytes=1019)["peak_allocated_bytes"].within is True
    assert rows_of(peak_allocated_bytes=1021)["peak_allocated_bytes"].within is False
    assert rows_of(peak_allocated_bytes=979)["peak_allocated_bytes"].within is False


def test_drawing_samples_is_no_part_of_the_steps_that_are_measured():
    drawn = {**PLAN["memory"], "peak_phase": "sample", "by_phase": {"forward": 800, "backward": 950, "sample": 1000}}
    rows = {each.quantity: each for each in compare({**PLAN, "memory": drawn}, {"peak_allocated_bytes": 950})}
    assert rows["peak_allocated_bytes"].predicted == 950 and rows["peak_allocated_bytes"].within is True


def test_ratio_is_measured_over_predicted_and_rates_follow_the_step_time():
    rows = rows_of(step_seconds=0.11, images_per_second=400.0, mfu=0.5)
    assert rows["step_seconds"].ratio == pytest.approx(1.1)
    assert (rows["images_per_second"].low, rows["images_per_second"].high) == pytest.approx((256, 400))
    assert (rows["mfu"].low, rows["mfu"].high) == pytest.approx((0.32, 0.5))


def test_what_was_not_measured_or_not_predicted_judges_nothing():
    rows = rows_of(peak_reserved_bytes=5)
    assert rows["step_seconds"].measured is None and rows["step_seconds"].within is None
    assert rows["peak_reserved_bytes"].within is None and rows["peak_reserved_bytes"].ratio is None


def test_a_plan_without_time_judges_memory_alone():
    unknown = {"step_seconds": {"low": None, "mid": None, "high": None}, "images_per_second": None, "mfu": None}
    measured = {"step_seconds": 1.0, "images_per_second": 1.0, "peak_allocated_bytes": 1000}
    rows = compare(PLAN | {"time": unknown}, measured)
    assert {each.quantity for each in rows if each.within is not None} == {"peak_allocated_bytes"}
    assert verdict(rows) == "pass"


def test_verdict_needs_a_measurement_and_no_miss():
    good, bad, nothing = (row("x", "s", 1.0, 0.9, 1.1, value) for value in (1.0, 2.0, None))
    assert verdict([good, nothing]) == "pass"
    assert verdict([good, bad]) == "fail"
    assert verdict([nothing]) == "fail"
