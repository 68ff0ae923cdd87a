"""Configurations side by side."""

import pytest

from dit.config import TrainConfig, UsageError, replace
from dit.planner.what_if import side_by_side, variants


def plan(used, step, cost=None):
    return {"memory": {"verdict": "does_not_fit", "device_used_bytes": {"mid": used * 2**30}, "peak_phase": "backward",
                       "peak_allocated_bytes": 2**30},
            "time": {"step_seconds": {"mid": step}, "images_per_second": None},
            "run": {"hours": {"mid": 2.0}, "cost": cost}}


def test_numbers_after_the_first_column_carry_their_difference():
    rows = {row[0]: row[1:] for row in side_by_side({"": plan(10, 0.2), "--amp": plan(8, 0.1)})}
    assert rows["memory in use (GiB)"] == ("10.00", "8.00 (-20%)")
    assert rows["step (ms)"] == ("200.00", "100.00 (-50%)")
    assert rows["verdict"] == ("does not fit", "does not fit")
    assert "cost" not in rows and "images/s" not in rows, "what no plan knows has no row"


def test_a_step_that_only_one_plan_knows():
    rows = {row[0]: row[1:] for row in side_by_side({"a": plan(1, None), "b": plan(1, 0.1)})}
    assert rows["step (ms)"] == ("unknown", "100.00")


def test_each_text_is_flags_over_the_base():
    base = replace(TrainConfig(), model="DiT-L/4")
    found = variants(["", "--amp --ckpt"], base)
    assert found["(as given)"] == base
    assert found["--amp --ckpt"] == replace(base, amp=True, ckpt=True)
    with pytest.raises(UsageError, match="--amq"):
        variants(["--amq"], base)
