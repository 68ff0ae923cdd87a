"""A run that is killed, at any moment and as often as one likes, ends as if nothing had happened: bitwise, on a CPU."""

import json
import random
import signal
import time

import injections
import pytest
import sessions
import torch
from faultlog import goes_on, record

from dit.config_files import load_toml
from dit.data import build_dataset
from dit.metrics import JsonLines
from dit.parallel import Ranks
from dit.trainer import Feed

SMALL = ("--depth", 1, "--hidden-size", 16, "--num-heads", 2, "--global-batch-size", 8, "--log-every", 4,
         "--ckpt-every", 3, "--max-steps", 12)
STEPS = 12


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    sessions.run(folder, *SMALL)
    return folder


def test_the_same_command_twice_gives_the_same_run(reference, tmp_path):
    sessions.run(tmp_path / "run", *SMALL)
    assert sessions.difference(reference, tmp_path / "run", STEPS) == []
    assert len(sessions.logged(reference)) == STEPS


def test_killed_at_twenty_random_moments(reference, tmp_path):
    """Ten sessions die in a random event of steps and saves, ten after a random time; a run is killed several times."""
    choose = random.Random(5)
    killed, run = 0, 0
    while killed < 20:
        run += 1
        folder, kills, before = tmp_path / f"run{run}", choose.randint(2, 5), killed
        for _ in range(kills):
            if killed < 10:
                session = sessions.start(folder, *SMALL, inject=injections.kill_in_event,
                                         values=(choose.randint(1, 150),))
            else:
                session = sessions.start(folder, *SMALL)
                session.wait_for("to go")
                delay = choose.uniform(0, 1)
                session._process.join(delay)
                session.kill()
            if session.wait() == 0:
                break
            killed += 1
        goes_on(reference, folder, *SMALL, times=killed - before, fault="process killed at a random moment",
                injected="SIGKILL, up to 5 times a run")


@pytest.mark.parametrize("moment", ["half written", "before its name", "after its name", "old ones deleted"])
def test_killed_inside_a_save_twice(reference, tmp_path, moment):
    for _ in range(2):
        sessions.run(tmp_path / "run", *SMALL, inject=injections.kill_in_save, values=(moment,), code=-signal.SIGKILL)
    goes_on(reference, tmp_path / "run", *SMALL, times=2, fault="process killed inside a save",
            injected=f"SIGKILL, {moment}, twice")
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"0000006.pt", "0000009.pt", "0000012.pt"}, "a half-written file stayed"


@pytest.mark.parametrize("settings", [("--amp", "--amp-dtype", "fp16"), ("--optimizer", "adamw-foreach"),
                                      ("--ema", "off", "--grad-accum", 2), ("--warmup-steps", 9, "--clip-grad", 0.5)],
                         ids=lambda settings: settings[1])
def test_every_state_is_taken_up(tmp_path, settings):
    """The GradScaler's, either optimizer's, none where there is no average, and the schedule's, which is the step."""
    sessions.run(tmp_path / "whole", *SMALL, *settings)
    sessions.run(tmp_path / "parts", *SMALL, *settings, "--max-steps", 7)
    text = sessions.run(tmp_path / "parts", *SMALL, *settings)
    assert "step 7 of 12, 5 to go" in text and "changed since the last session: --max-steps was 7, now 12" in text
    assert sessions.difference(tmp_path / "whole", tmp_path / "parts", STEPS) == []
    record("stop and start", "every optimizer and scaler state", after="the same command went on",
           lost="nothing (bitwise)")


def test_lines_and_memory_of_a_resumed_run_are_those_of_a_whole_one(reference, tmp_path):
    """A line's window reaches back into the session before; loading a file leaves nothing in memory."""
    def lines(folder):
        return [line.split("  ")[1:5] for line in (folder / "log.txt").read_text().splitlines() if "  grad " in line]

    def peak(folder, step):
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[step])["peak_allocated_bytes"]

    sessions.run(tmp_path / "run", *SMALL, "--max-steps", 6)
    sessions.run(tmp_path / "run", *SMALL)
    whole, parts = lines(reference), lines(tmp_path / "run")
    assert [line[0] for line in whole] == ["step 4/12", "step 8/12", "step 12/12"]
    assert [line for line in parts if line[0].endswith("/12")] == whole[1:]
    assert [peak(tmp_path / "run", step) for step in (6, 7)] == [peak(reference, step) for step in (0, 1)]
    assert peak(tmp_path / "run", 8) == peak(reference, 4) == peak(reference, 8), "a save or a load stayed in memory"


def test_a_run_that_is_complete_does_nothing(reference):
    before = {path: path.read_bytes() for path in (reference / "checkpoints").iterdir()}
    assert "step 12 of 12, 0 to go" in sessions.run(reference, *SMALL)
    assert {path: path.read_bytes() for path in (reference / "checkpoints").iterdir()} == before


def test_a_killed_run_leaves_no_lock_not_even_in_its_loader_workers(tmp_path):
    session = sessions.start(tmp_path / "run", *SMALL, "--num-workers", 2, "--max-steps", 10_000)
    session.wait_for("saved")
    with pytest.raises(AssertionError, match=f"--run-dir .*/run: in use by process {session.pid} on"):
        sessions.run(tmp_path / "run", *SMALL)
    session.kill()
    sessions.run(tmp_path / "run", *SMALL, "--num-workers", 2, "--max-steps", 10_000, inject=injections.signal_at_step,
                 values=(6, signal.SIGTERM), code=128 + signal.SIGTERM)
    record("job killed while its loader workers live on", "SIGKILL, then the same command at once",
           after="the folder was free")


def test_ten_million_steps_in_are_reached_in_a_second():
    dataset = build_dataset(load_toml(sessions.ROOT / "configs" / "tiny.toml"))
    ranks, config = Ranks(0, 0, 1, torch.device("cpu")), load_toml(sessions.ROOT / "configs" / "tiny.toml")
    feed = Feed(config, dataset, ranks)
    start = time.perf_counter()
    feed.start(10_000_000, 1)
    next(feed)
    assert time.perf_counter() - start < 1


def test_a_long_log_is_cut_without_reading_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(300_000)))
    start = time.perf_counter()
    JsonLines(path, 299_990).close()
    assert time.perf_counter() - start < 0.1
    assert path.read_text().endswith('{"step": 299989, "loss": 0.5}\n')
