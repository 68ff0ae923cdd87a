"""What a run measures of itself, and where it goes."""

import json
import time

import pytest
import torch

from dit.config import UsageError
from dit.metrics import KEYS, Console, DeviceFacts, JsonLines, StepMeter, Tracker, read_metrics
from dit.metrics_memory import Memory, MemoryWatch, live_tensor_bytes
from dit.parallel import Ranks
from dit.step import StepResult
from dit.terminal import duration

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


def result(loss=0.5, grad_norm=2.0, skipped=0.0):
    return StepResult(*(torch.tensor(value) for value in (loss, grad_norm, skipped, 1.0)))


def test_records_have_every_key_of_the_contract_and_null_where_nothing_was_measured():
    meter = StepMeter(RANKS, 8, DeviceFacts())
    meter.add(0, result(), lr=0.1, data_wait_seconds=0.01, timed=False)
    record, = meter.report()
    assert tuple(record) == KEYS
    assert record["step_seconds"] is None and record["images_per_second"] is None and record["mfu"] is None
    assert record["peak_allocated_bytes"] is None and record["device_used_bytes"] > 10**7
    assert (record["loss"], record["grad_norm"], record["skipped"]) == (0.5, 2.0, 0)
    assert meter.report() == []


def test_rates_follow_from_the_time_of_a_step(monkeypatch):
    monkeypatch.setattr(Ranks, "mean", lambda self, tensor: tensor)  # there is no second process here
    ranks = Ranks(0, 0, 2, torch.device("cpu"))
    meter = StepMeter(ranks, 8, DeviceFacts(train_flops_per_image=1e9, peak_flops=1e12))
    time.sleep(0.05)
    meter.add(0, result(), lr=0.1, data_wait_seconds=0.0, memory=Memory(1, 2, None, 3))
    record, = meter.report()
    seconds = record["step_seconds"]
    assert 0.05 <= seconds < 1
    assert record["images_per_second"] == pytest.approx(8 / seconds)
    assert record["images_per_second_per_device"] == pytest.approx(4 / seconds)
    assert record["model_tflops_per_device"] == pytest.approx(4 / seconds * 1e9 / 1e12)
    assert record["mfu"] == pytest.approx(4 / seconds * 1e9 / 1e12)
    assert (record["allocated_bytes"], record["peak_allocated_bytes"], record["device_used_bytes"]) == (1, 2, 3)


def test_time_between_pause_and_resume_belongs_to_no_step():
    meter = StepMeter(RANKS, 8, DeviceFacts())
    time.sleep(0.2)
    meter.resume()
    meter.add(0, result(), lr=0.1, data_wait_seconds=0.0)
    assert meter.report()[0]["step_seconds"] < 0.1


def test_a_loss_that_is_not_a_number_is_null_in_the_file(tmp_path):
    meter, sink = StepMeter(RANKS, 8, DeviceFacts()), JsonLines(tmp_path / "metrics.jsonl", 0)
    meter.add(0, result(loss=float("nan"), grad_norm=float("inf"), skipped=1.0), lr=0.1, data_wait_seconds=0.0)
    sink.write(meter.report())
    sink.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["loss"] is None and record["grad_norm"] is None and record["skipped"] == 1


def test_a_resumed_file_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(7)) + '{"step": 7, "lo')
    sink = JsonLines(path, 5)
    sink.write([{"step": 5}, {"step": 6}])
    sink.close()
    assert [record["step"] for record in read_metrics(path)] == list(range(7))


def test_reading_leaves_out_a_line_that_a_crash_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [record["step"] for record in read_metrics(path)] == [0, 1]


def test_console_line_tells_speed_memory_and_remaining_time():
    lines = []
    record = dict.fromkeys(KEYS) | {
        "step": 9, "loss": 0.25, "grad_norm": 1.5, "lr": 1e-3, "step_seconds": 2.0, "skipped": 1,
        "data_wait_seconds": 0.5,
        "images_per_second": 4.0, "images_per_second_per_device": 4.0, "peak_allocated_bytes": 3 * 2**30}
    facts = DeviceFacts(planned_step_seconds=1.9, planned_peak_bytes=2.5 * 2**30)
    Console(lines.append, 40, facts=facts).write([record])
    line, = lines
    for words in ("step 10/40", "loss 0.2500", "2000.0 ms/step (planned 1900.0)", "data wait 25 %",
                  "peak 3.00 GiB (planned 2.50)", "1 skipped", "left 1m00s"):
        assert words in line


def test_durations_read_as_people_say_them():
    texts = [duration(seconds) for seconds in (0, 59.6, 245, 11520, 198000)]
    assert texts == ["0s", "1m00s", "4m05s", "3h12m", "2d07h"]


def test_memory_watch_counts_tensor_bytes_by_phase():
    watch = MemoryWatch(torch.device("cpu"))

    def step(phase):
        with phase("forward"):
            kept = torch.zeros(1 << 18)
        with phase("backward"):
            torch.ones(1 << 20).sum()
        return kept

    kept, memory = watch.run(step)
    grown = watch.peak_by_phase["backward"] - watch.peak_by_phase["forward"]
    assert kept.numel() == 1 << 18
    assert grown == pytest.approx(4 << 20, abs=4096)
    assert memory.peak_allocated == pytest.approx(memory.allocated + (4 << 20), abs=4096)
    assert memory.peak_reserved is None


def test_tensors_that_are_being_given_up_are_not_counted():
    """torch 2.6 leaves those without a device that another thread has just freed; the others are counted."""
    class GivenUp(torch.Tensor):
        @property
        def device(self):
            raise RuntimeError("tensor does not have a device")

    given_up = torch.zeros(1 << 20).as_subclass(GivenUp)
    before = live_tensor_bytes()
    counted = torch.zeros(1 << 20)
    assert live_tensor_bytes() - before == counted.nbytes, "it is counted neither before nor after"
    assert given_up.numel() == 1 << 20


def test_a_tracker_whose_package_is_missing_is_refused(tmp_path, monkeypatch):
    from accelerate import tracking
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [])
    with pytest.raises(UsageError, match="--tracker wandb.*not installed"):
        Tracker("wandb", tmp_path, {})
