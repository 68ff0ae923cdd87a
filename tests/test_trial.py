"""A trial end to end: the plan is frozen before the first step, and judged by what was measured after it."""

import hashlib
import json
import runpy
from pathlib import Path

import pytest

from dit.config import TrainConfig, UsageError, replace
from dit.metrics import KEYS
from dit.planner.compare import as_dicts, row, verdict
from dit.report import plan_sentence, print_table, table_rows, verdict_sentence, write_report
from dit.terminal import show
from dit.trial import full_run, measure, warmup_steps

ROOT = Path(__file__).parent.parent
TINY = ["--config", str(ROOT / "configs" / "tiny.toml")]
train_main = runpy.run_path(str(ROOT / "train.py"))["main"]


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """The folder of a finished tiny trial."""
    folder = tmp_path_factory.mktemp("trials") / "tiny"
    assert train_main([*TINY, "--run-dir", str(folder), "--trial", "--trial-steps", "12"]) == 0
    return folder


def test_the_plan_of_a_trial_is_frozen_before_its_first_step(trial):
    result = json.loads((trial / "trial.json").read_text())
    assert result["plan_sha256"] == hashlib.sha256((trial / "plan.json").read_bytes()).hexdigest()
    first_save = min(path.stat().st_mtime for path in (trial / "checkpoints").glob("*.pt"))
    assert (trial / "plan.json").stat().st_mtime < first_save
    plan = json.loads((trial / "plan.json").read_text())
    assert plan["run"]["steps"] == 20, "the plan is of the whole run, not of the trial"


def test_trial_json_keeps_its_contract_and_memory_is_planned_to_two_percent(trial):
    result = json.loads((trial / "trial.json").read_text())
    assert {"plan_sha256", "environment", "steps", "warmup_steps", "rows", "verdict", "full_run"} <= result.keys()
    assert (result["steps"], result["warmup_steps"]) == (12, 3)
    rows = {each["quantity"]: each for each in result["rows"]}
    keys = {"quantity", "unit", "predicted", "low", "high", "measured", "ratio", "within"}
    assert all(set(each) == keys for each in rows.values())
    assert rows["peak_allocated_bytes"]["within"] is True
    assert rows["peak_allocated_bytes"]["ratio"] == pytest.approx(1, abs=0.02)
    assert rows["peak_reserved_bytes"]["measured"] is None, "a CPU has no caching allocator"
    assert rows["step_seconds"]["measured"] > 0
    assert rows["checkpoint_bytes"]["within"] is True
    phases = result["memory_by_phase"]
    for phase in ("forward", "backward", "optimizer", "ema"):
        assert phases["measured"][phase] == pytest.approx(phases["predicted"][phase], rel=0.02), phase


def test_the_same_command_goes_on_and_the_plan_stays(trial):
    before = (trial / "plan.json").read_bytes()
    assert train_main([*TINY, "--run-dir", str(trial)]) == 0
    assert (trial / "plan.json").read_bytes() == before
    assert (trial / "checkpoints" / "0000020.pt").exists()


def test_the_report_shows_predicted_beside_measured_and_the_curves(trial):
    text, page = (trial / "report.md").read_text(), (trial / "report.html").read_text()
    for words in ("Trial of custom on 1 x CPU", "| quantity | predicted | low | high | measured | ratio | within |",
                  "not measured", "Memory by phase", "frozen before the first step"):
        assert words in text
    assert "data:image/png;base64," in page and "<script" not in page


def test_a_run_that_will_not_fit_is_refused_when_a_fit_is_required(tmp_path):
    with pytest.raises(UsageError, match="--plan require: .*does NOT fit") as refused:
        train_main(["--model", "DiT-XL/2", "--data", "synthetic", "--global-batch-size", "512", "--plan", "require",
                    "--run-dir", str(tmp_path / "run")])
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "run").rglob("*.pt"))


# ---- pieces ----

PLAN = {
    "config": {"model": {"model": "DiT-S/2"}, "memory": {"global_batch_size": 8}},
    "num_devices": 2, "notes": ["A note."],
    "device": {"name": "H100", "memory_bytes": 80 * 2**30}, "calibration": {"kind": "prior", "source": "the catalogue"},
    "memory": {"verdict": "fits", "peak_phase": "backward", "device_used_bytes": {"low": 1, "mid": 2**30, "high": 3}},
    "time": {"step_seconds": {"low": 0.08, "mid": 0.1, "high": 0.12}, "bound_by": "compute"},
    "run": {"steps": 1000, "hours": {"low": 1, "mid": 2, "high": 3}, "cost": 10.0},
}


def result_of(*rows, hours=2.0):
    return {"rows": as_dicts(rows), "verdict": verdict(list(rows)), "steps": 5, "warmup_steps": 1,
            "plan_sha256": "ab" * 32, "memory_by_phase": {"predicted": {"forward": 1}, "measured": {}},
            "full_run": {"steps": 1000, "hours": {"low": hours, "mid": hours, "high": hours}, "cost": 12.0}}


def test_figures_are_shown_with_their_unit():
    assert show(3 * 2**30, "bytes") == "3.00 GiB" and show(2**20, "bytes") == "1.0 MiB"
    assert show(0.0123, "s") == "12.3 ms" and show(75.0, "s") == "75.00 s" and show(0.412, "") == "41.2 %"
    assert show(None, "bytes") == "not measured"


def test_the_verdict_names_what_missed_and_says_what_to_do(capsys):
    missed = result_of(row("step_seconds", "s", 0.1, 0.08, 0.12, 0.2), row("mfu", "", 0.4, 0.3, 0.5, None))
    assert "time per step" in verdict_sentence(missed) and "calibrate" in verdict_sentence(missed)
    assert table_rows(missed["rows"])[0][-2:] == ("2.000", "NO") and table_rows(missed["rows"])[1][4] == "not measured"
    print_table(missed)
    printed = capsys.readouterr().out
    assert "verdict: FAIL" in printed and "time per step" in printed
    held = result_of(row("step_seconds", "s", 0.1, 0.08, 0.12, 0.1))
    assert "2h00m" in verdict_sentence(held) and "without --trial" in verdict_sentence(held)


def test_a_report_escapes_what_it_shows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": 1.0 / (step + 1), "step_seconds": 0.1}) + "\n" for step in range(5)))
    plan = PLAN | {"notes": ["<b>bold</b>"]}
    path = write_report(tmp_path, plan, result_of(row("step_seconds", "s", 0.1, 0.08, 0.12, 0.1)))
    assert "&lt;b&gt;" in path.read_text() and "<b>" not in path.read_text()


def test_a_plan_in_one_line():
    unknown = {"step_seconds": {"low": None, "mid": None, "high": None}, "bound_by": None}
    assert "time not planned" in plan_sentence(PLAN | {"time": unknown})
    room = "plan: fits on H100 (1.00 GiB of 80.00 GiB, peak in backward); "
    assert plan_sentence(PLAN).startswith(room + "100.0 ms per step (80.0 ms to 120.0 ms), bound by compute")


def test_warm_up_is_a_tenth_at_least_three_and_at_most_fifty():
    assert [warmup_steps(steps) for steps in (1, 4, 20, 100, 500, 5000)] == [0, 3, 3, 10, 50, 50]


def test_measured_figures_are_medians_and_maxima_of_what_was_measured(tmp_path):
    empty = dict.fromkeys(KEYS)
    records = [empty | {"peak_allocated_bytes": size} for size in (5, 9, 7)]
    records += [empty | {"step_seconds": seconds} for seconds in (3.0, 1.0, 2.0)]
    found = measure(records[3:], records, tmp_path / "missing.pt")
    assert found["step_seconds"] == 2.0 and found["peak_allocated_bytes"] == 9
    assert found["mfu"] is None and found["checkpoint_bytes"] is None
    two_steps = records[:2] + records[3:]
    assert measure(two_steps, two_steps, tmp_path)["peak_allocated_bytes"] is None, "too few to judge"


def test_the_whole_run_is_projected_from_the_measured_speed():
    steady = [{"step_seconds": seconds} for seconds in (3.6, 3.6, 7.2, 3.6, None)]
    run = full_run(PLAN, steady)
    assert run["steps"] == 1000 and run["hours"]["mid"] == pytest.approx(1.0)
    assert run["cost"] == pytest.approx(5.0), "half the planned hours, half the planned cost"
    assert full_run(PLAN, [{"step_seconds": None}])["hours"]["mid"] is None


def test_a_trial_plans_the_whole_run():
    config = replace(TrainConfig(), trial=True, trial_steps=5, max_steps=50)
    assert config.total_steps(10) == 5 and replace(config, trial=False).total_steps(10) == 50
