"""The average on the host: the same numbers as on the device, off the device's memory and off the step's path."""

import threading

import pytest
import runs
import torch
from runs import ONE, TINY

from dit import planner
from dit.config import UsageError, replace
from dit.ema import Ema
from dit.host_ema import HostEma
from dit.planner import hardware
from dit.run_folder import check_resumable
from dit.saving import state_of

HOST = replace(TINY, ema="host")


def test_averages_are_those_of_the_device_to_the_last_bit():
    on_device, on_host = runs.build(ONE, TINY), runs.build(ONE, HOST)
    assert isinstance(on_device.ema, Ema) and isinstance(on_host.ema, HostEma)
    first = runs.run(ONE, TINY, 5, parts=on_device)
    second = runs.run(ONE, HOST, 5, parts=on_host)
    assert first.steps == second.steps and first.averages.keys() == second.averages.keys()
    assert all(torch.equal(second.averages[name], average) for name, average in first.averages.items())
    assert any(not torch.equal(average, first.weights[name]) for name, average in first.averages.items())


def test_a_skipped_step_leaves_the_averages():
    parts = runs.build(ONE, HOST)
    runs.run(ONE, HOST, 2, parts=parts)
    before = {name: average.clone() for name, average in parts.ema.state_dict().items()}
    parts.ema.update(0.5, torch.ones(()))
    assert all(torch.equal(before[name], average) for name, average in parts.ema.state_dict().items())
    parts.ema.update(0.5, torch.zeros(()))
    assert any(not torch.equal(before[name], average) for name, average in parts.ema.state_dict().items())


def test_an_update_does_not_wait_for_the_averaging_and_reading_does(monkeypatch):
    parts = runs.build(ONE, HOST)
    runs.run(ONE, HOST, 2, parts=parts)
    go, average = threading.Event(), HostEma._average

    def slow(self, decay, copied):
        assert threading.current_thread() is not threading.main_thread()
        go.wait(10)
        average(self, decay, copied)

    monkeypatch.setattr(HostEma, "_average", slow)
    expected = {name: 0.5 * (old + parts.model.get_parameter(name).detach())
                for name, old in parts.ema.state_dict().items()}
    parts.ema.update(0.5, torch.zeros(()))  # comes back although the averaging has not begun
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.zero_()  # the next step's change must not reach the average of this one
    go.set()
    for name, found in parts.ema.state_dict().items():
        torch.testing.assert_close(found, expected[name])


def test_an_error_of_the_thread_reaches_the_loop(monkeypatch):
    parts = runs.build(ONE, HOST)

    def fails(self, decay, copied):
        raise RuntimeError("no more")

    monkeypatch.setattr(HostEma, "_average", fails)
    parts.ema.update(0.5, torch.zeros(()))
    with pytest.raises(RuntimeError, match="no more"):
        parts.ema.update(0.5, torch.zeros(()))


def test_the_model_carries_the_averages_for_a_while():
    parts = runs.build(ONE, HOST)
    result = runs.run(ONE, HOST, 3, parts=parts)
    with parts.ema.swapped_in():
        inside = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    assert all(torch.equal(inside[name], average) for name, average in result.averages.items())
    assert all(torch.equal(parameter, result.weights[name]) for name, parameter in parts.model.named_parameters())
    again = runs.run(ONE, HOST, 1, parts=parts, first=3)
    straight = runs.run(ONE, HOST, 4)
    assert all(torch.equal(again.averages[name], average) for name, average in straight.averages.items())


def test_state_goes_from_device_to_host_and_back():
    config = replace(TINY, ema="device")
    parts = runs.build(ONE, config)
    result = runs.run(ONE, config, 2, parts=parts)
    host = runs.build(ONE, HOST)
    host.ema.load_state_dict(state_of(config, parts, 2)["ema"])
    assert all(torch.equal(average, result.averages[name]) for name, average in host.ema.state_dict().items())
    assert state_of(HOST, host, 2)["ema"].keys() == parts.model.state_dict().keys()
    with pytest.raises(KeyError):
        host.ema.load_state_dict({})


def test_a_run_may_move_its_average_but_not_drop_it(tmp_path):
    check_resumable(HOST, TINY, tmp_path)
    check_resumable(TINY, HOST, tmp_path)
    with pytest.raises(UsageError, match="--ema was host, now off"):
        check_resumable(replace(TINY, ema="off"), HOST, tmp_path)


def test_the_device_holds_the_averages_bytes_less():
    device = hardware.find_device("A100-80GB")
    with_average, without, off = (
        planner.plan(replace(TINY, ema=where), device, 1).to_dict()["memory"] for where in ("device", "host", "off"))
    size = with_average["by_category"]["ema"]
    trained = [parameter for parameter in runs.build(ONE, TINY).model.parameters() if parameter.requires_grad]
    assert size >= 4 * sum(parameter.numel() for parameter in trained) and without["by_category"].get("ema", 0) == 0
    assert with_average["peak_allocated_bytes"] - without["peak_allocated_bytes"] == pytest.approx(size, rel=0.01)
    assert without["peak_allocated_bytes"] == off["peak_allocated_bytes"]
