"""Signals, full disks, bad numbers, too little memory, lost processes: what is said, what is left, the exit code."""

import json
import os
import re
import signal
import subprocess
import time

import injections
import pytest
import sessions
import torch
from faultlog import goes_on, record
from runs import needs_fsdp
from test_resume import SMALL

from dit.checkpoint import steps_in


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    sessions.run(folder, *SMALL)
    return folder


def saved_steps(folder):
    return steps_in(folder / "checkpoints")


# ---- signals ----

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_and_leaves_with_its_exit_code(reference, tmp_path, number):
    text = sessions.run(tmp_path / "run", *SMALL, inject=injections.signal_at_step, values=(4, number),
                        code=128 + number)
    assert f"stopped by signal {int(number)} after step 5 of 12, saved; the same command with --run-dir" in text
    assert saved_steps(tmp_path / "run") == [3, 5]
    goes_on(reference, tmp_path / "run", *SMALL, fault="preemption or Ctrl-C", injected=number.name,
            after=f"saved after the step, exit code {128 + number}; the same command went on")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_every_process_of_the_job_leaves_the_loader_workers_to_the_trainer(tmp_path, number):
    """A terminal sends Ctrl-C to all of them, Slurm its signals."""
    session = sessions.start(tmp_path / "run", *SMALL, "--num-workers", 2, "--max-steps", 10_000)
    session.wait_for("saved")
    with open(f"/proc/{session.pid}/task/{session.pid}/children") as file:
        workers = [int(pid) for pid in file.read().split()]
    for pid in (*workers, session.pid):
        os.kill(pid, number)
    assert len(workers) >= 2 and session.wait() == 128 + number, session.text
    assert re.search(r"stopped by signal \d+ after step \d+ of 10000, saved", session.text)


def test_a_second_ctrl_c_ends_at_once(reference, tmp_path):
    sessions.run(tmp_path / "run", *SMALL, inject=injections.signal_at_step,
                 values=(4, signal.SIGINT, signal.SIGINT), code=-signal.SIGINT)
    assert saved_steps(tmp_path / "run") == [3]
    goes_on(reference, tmp_path / "run", *SMALL, fault="Ctrl-C twice", injected="SIGINT, SIGINT",
            after="ended at once; the same command went on from the newest file")


def test_ranks_agree_on_the_step_to_leave_after(reference, tmp_path):
    """Only one rank hears the signal."""
    ranks = sessions.start_ranks(tmp_path / "run", 2, *SMALL, "--max-steps", 10_000)
    ranks[0].wait_for("saved")
    ranks[1].send(signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [128 + signal.SIGUSR1] * 2
    last = saved_steps(tmp_path / "run")[-1]
    assert f"after step {last} of 10000, saved" in ranks[0].text
    record("preemption heard by one rank of two", "SIGUSR1", after="both saved and left after the same step")


# ---- saves that cannot be written ----

def test_too_little_room_is_said_before_the_first_step(tmp_path):
    text = sessions.run(tmp_path / "run", *SMALL, inject=injections.no_room, values=(2**20, 1), code=2)
    assert re.search(r"run/checkpoints: 0\.000977 GiB free, a checkpoint file needs 0\.01\d+; make room", text)
    assert "step 4/12" not in text


@pytest.mark.parametrize("fault", [(injections.no_room, (2**20, 3)), (injections.file_limit, (100_000,))],
                         ids=["planned bytes", "real limit"])
def test_a_disk_that_becomes_full_stops_the_run_and_spares_the_file_before(reference, tmp_path, fault):
    """The second save fails: by the bytes that are free, or in the middle of writing, where the system refuses."""
    sessions.run(tmp_path / "run", *SMALL, "--max-steps", 3)
    inject, values = fault
    text = sessions.run(tmp_path / "run", *SMALL, inject=inject, values=values, code=2)
    assert "earlier files are untouched" in text and "Traceback" not in text
    assert ("File too large" if inject is injections.file_limit else "GiB free") in text
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == (["0000003.pt"] if inject is injections.file_limit else ["0000003.pt", "0000006.pt"])
    goes_on(reference, tmp_path / "run", *SMALL, fault="disk full",
            injected="too few free bytes" if inject is injections.no_room else "writes refused in the middle of a file",
            after="exit code 2, earlier files untouched; the same command went on")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_file_system_that_is_full_then_read_only_then_mended(reference, tmp_path, small_disk):
    folder, filler = small_disk / "run", small_disk / "filler"

    def run(*args, unasked=False, code=0):
        return sessions.run(folder, *SMALL, *args, inject=injections.no_spare, values=(unasked,), code=code,
                            logs=tmp_path)

    run("--max-steps", 3)
    disk = os.statvfs(small_disk)
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 2**16))
    text = run(unasked=True, code=2)
    assert "No space left on device" in text and "Traceback" not in text and saved_steps(folder) == [3]
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert f"--run-dir {folder}: cannot be written (Read-only file system)" in run(code=2)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    goes_on(reference, folder, *SMALL, inject=injections.no_spare, logs=tmp_path, times=2,
            fault="disk full, then read-only", injected="a tmpfs without room, then remounted",
            after="exit code 2 with the reason; the same command went on")


def test_a_failed_save_of_rank_0_takes_the_others_along(tmp_path):
    start = time.monotonic()
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--max-steps", 10_000, inject=injections.no_room,
                              values=(2**20, 3), code=2)
    assert text.count("GiB free, a checkpoint file needs") == 1 and saved_steps(tmp_path / "run") == [3]
    assert time.monotonic() - start < 30
    record("rank 0 cannot save", "no room", after="both ranks left with exit code 2 and one message")


@pytest.mark.parametrize(("fault", "said"), [
    ((injections.file_limit, (100_000,)), r"could not write .*0000003\.pt: File too large; earlier files are"),
    ((injections.checkpoints_vanish, (1,)), r"run/checkpoints: No such file or directory; the file was not written"),
], ids=["disk full", "folder gone"])
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=needs_fsdp)])
def test_a_failed_last_save_ends_every_rank_with_its_code(tmp_path, fault, said, parallel):
    """Nothing comes after it that would take the others along: they wait for the last file."""
    inject, values = fault
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--max-steps", 3, "--parallel", parallel, inject=inject,
                              values=values, code=2)
    assert "Traceback" not in text and text.count("train.py: error:") == 1, text
    assert re.search(said.replace(r"\.pt", r"\.(pt|sharded)"), text), text
    record("the last save of two ranks fails", "disk full" if inject is injections.file_limit else "its folder is gone",
           after="both ranks left with exit code 2 and one message")


def test_the_last_file_may_take_longer_than_a_rank_may_be_silent(tmp_path):
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--max-steps", 3, "--rank-timeout", 2,
                              inject=injections.slow_disk, values=(1.5, 0.2))
    assert "saved" in text and saved_steps(tmp_path / "run") == [3]


def test_training_goes_on_while_a_slow_disk_takes_a_file(tmp_path):
    """Flushing takes three times half a second, of which the loop sees nothing."""
    text = sessions.run(tmp_path / "run", *SMALL, "--ckpt-every", 5, "--log-every", 1000,
                        inject=injections.slow_disk, values=(0.5,))
    first = re.search(r"0000005.pt .* GiB in (\d+)s; training paused (\d+) ms", text)
    assert int(first[1]) >= 1 and int(first[2]) < 400
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(each["step_seconds"] for each in records[5:]) < 0.4
    record("slow disk", "1.5 s to flush a file", after=f"training paused {first[2]} ms")


# ---- numbers that go wrong ----

@pytest.mark.parametrize("kind", ["loss", "loss alone", "module", "data"])
def test_a_bad_step_is_skipped_and_poisons_nothing(tmp_path, kind):
    sessions.run(tmp_path / "run", *SMALL, "--ckpt-every", 1, "--keep-last", 0, inject=injections.bad_numbers,
                 values=(kind, (5,)))
    records = sessions.logged(tmp_path / "run")
    assert [record["step"] for record in records if record["skipped"]] == [5]
    before, after = (sessions.state(tmp_path / "run", step) for step in (5, 6))
    for name in ("model", "ema"):
        assert all(torch.equal(before[name][key], after[name][key]) for key in before[name])
    assert before["opt"]["state"][1]["step"] == after["opt"]["state"][1]["step"] == 5
    assert (before["bad_steps"], after["bad_steps"]) == (0, 1)
    assert all(each["loss"] is not None for each in records[6:])
    record("one step not finite", f"in the {kind}", after="skipped, logged; weights, moments, average untouched")


@pytest.mark.parametrize(("kind", "place"), [
    ("loss", "the loss, of finite outputs"), ("module", "the output of blocks.0"), ("data", "the data")])
def test_many_bad_steps_end_with_a_diagnosis(tmp_path, kind, place):
    text = sessions.run(tmp_path / "run", *SMALL, "--max-bad-steps", 3, "--log-every", 1, inject=injections.bad_numbers,
                        values=(kind, tuple(range(5, 100))), code=3)
    newest = tmp_path / "run" / "checkpoints" / "0000006.pt"
    assert ("stopped: steps 5 to 7 (3 in a row, --max-bad-steps 3) had a loss or gradient that is not finite; they "
            f"were skipped; first not finite: {place}; the last good file is {newest}") in text
    assert dict(sessions.state(tmp_path / "run", 6))["bad_steps"] == 1, "the count goes on in the next session"
    record("every step not finite", f"in the {kind}", after=f"exit code 3 after --max-bad-steps; named: {place}")


def test_a_loss_scale_at_its_floor_stops(tmp_path):
    text = sessions.run(tmp_path / "run", *SMALL, "--amp", "--amp-dtype", "fp16", "--log-every", 1, "--max-bad-steps",
                        1000, "--max-steps", 100, inject=injections.bad_numbers, values=("loss", tuple(range(100))),
                        code=3)
    assert "stopped: step 16 overflowed with the loss scale at its floor of 1; first not finite: the loss" in text
    scales = [record["loss_scale"] for record in sessions.logged(tmp_path / "run")]
    assert scales == [2.0 ** (16 - step) for step in range(17)]
    record("loss scale falls to its floor", "fp16, every loss NaN", after="exit code 3 with a diagnosis")


def test_weights_that_are_not_finite_never_get_into_a_file(tmp_path):
    text = sessions.run(tmp_path / "run", *SMALL, inject=injections.bad_weights_at, values=(6,), code=3)
    assert ("stopped: after step 6 model/blocks.0.mlp.fc1.weight is not finite; 0000006.pt was not written; the last "
            f"good file is {tmp_path / 'run' / 'checkpoints' / '0000003.pt'}") in text
    assert saved_steps(tmp_path / "run") == [3]
    record("weights not finite", "an infinite weight before a save", after="no file written, exit code 3",
           lost="steps since the last finite file")


def test_ranks_agree_on_skipping_and_say_on_which_rank_it_began(tmp_path):
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--max-bad-steps", 2, "--log-every", 1,
                              inject=injections.bad_numbers, values=("loss", (3, 6, 7, 8), 1), code=3)
    assert [record["skipped"] for record in sessions.logged(tmp_path / "run")] == [0, 0, 0, 1, 0, 0, 1, 1]
    assert text.count("stopped: steps 6 to 7 (2 in a row") == 1
    assert "first not finite: the loss, of finite outputs on rank 1; the last good file is" in text
    record("loss not finite on one rank of two", "4 steps", times=4, after="both skipped the same steps; rank named")


@needs_fsdp
def test_a_model_spread_over_ranks_is_searched_too(tmp_path):
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--parallel", "fsdp", "--max-bad-steps", 2, "--log-every", 1,
                              "--grad-accum", 2, inject=injections.bad_numbers, values=("module", (6, 7, 8), 1), code=3)
    assert "stopped: steps 6 to 7 (2 in a row" in text and "Traceback" not in text
    assert "first not finite: the output of blocks.0 on rank 1; the last good file is" in text
    record("every step not finite", "in the module, on one rank of two, --parallel fsdp",
           after="exit code 3 after --max-bad-steps; named: the output of blocks.0 on rank 1")


# ---- memory that runs out ----

def test_memory_that_runs_out_halves_the_micro_batch_then_checkpoints(reference, tmp_path):
    """Micro-batches of 8 and 4 do not fit, 2 do not without checkpointing, and the second session begins with that."""
    folder = tmp_path / "run"
    text = sessions.run(folder, *SMALL, "--plan", "warn", "--max-steps", 6, inject=injections.memory_for, values=(1,))
    assert "out of memory in step 0 (forward): CUDA out of memory. Tried to allocate 2.00 GiB.; micro-batch 8 -> 4, " \
           "accumulation 1 -> 2" in text
    assert text.count("; step 0 is repeated") == 3 and "planned peak" in text
    adapted = json.loads((folder / "adapted.json").read_text())
    assert adapted["used"]["grad_accum"] == 8 and adapted["asked"]["grad_accum"] == 1
    text = sessions.run(folder, *SMALL, inject=injections.memory_for, values=(1,))
    assert "out of memory in an earlier session" in text and "is repeated" not in text
    assert close(sessions.logged(reference), sessions.logged(folder))
    record("out of memory", "micro-batches above 1 do not fit", times=3, lost="nothing (losses within 1e-4)",
           after="micro-batch 8 -> 4 -> 2 -> 1, the step repeated")


def test_memory_that_is_still_too_small_is_met_with_checkpointing_and_then_given_up(reference, tmp_path):
    text = sessions.run(tmp_path / "run", *SMALL, inject=injections.memory_for, values=(0, 1))
    assert "micro-batch 1 -> 1, accumulation 8 -> 8, checkpointed blocks 0 -> 1" in text
    assert close(sessions.logged(reference), sessions.logged(tmp_path / "run"))
    record("out of memory", "micro-batch 1 fits with checkpointing only", times=4,
           lost="nothing (losses within 1e-4)", after="micro-batch 1, then checkpointing")
    text = sessions.run(tmp_path / "other", *SMALL, inject=injections.memory_for, values=(0, 0), code=5)
    assert "the micro-batch is 1 and every block is checkpointed" in text


def test_memory_that_runs_out_in_the_middle_leaves_no_trace_in_the_step(reference, tmp_path):
    """The second micro-batch of a step fails, when the first has left its gradients."""
    text = sessions.run(tmp_path / "run", *SMALL, "--grad-accum", 2, inject=injections.memory_once,
                        values=(11,))
    assert "out of memory in step 5 (forward)" in text and "micro-batch 4 -> 2, accumulation 2 -> 4" in text
    assert close(sessions.logged(reference), sessions.logged(tmp_path / "run"))
    record("out of memory", "in the second micro-batch of a step", lost="nothing (losses within 1e-4)",
           after="the step repeated from its first sample")


def test_on_oom_stop_says_what_would_fit(tmp_path):
    text = sessions.run(tmp_path / "run", *SMALL, "--plan", "warn", "--on-oom", "stop", inject=injections.memory_for,
                        values=(4,), code=5)
    assert re.search(r"stopped: out of memory in step 0 \(forward\): CUDA .*; this would fit: micro-batch 8 -> 4, "
                     r"accumulation 1 -> 2 \(planned peak 0.\d\d GiB\)", text)
    assert not (tmp_path / "run" / "adapted.json").exists()


def test_memory_that_runs_out_in_the_update_is_not_adapted_to(tmp_path):
    text = sessions.run(tmp_path / "run", *SMALL, inject=injections.memory_for, values=(1, 0, "optimizer"), code=5)
    assert "out of memory in step 0 (optimizer)" in text and "a smaller micro-batch would not help there" in text


def test_ranks_leave_together_and_begin_again_with_less(reference, tmp_path):
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, inject=injections.memory_for,
                              values=(2, 0, "forward", 1), code=5)
    assert text.count("stopped: out of memory in step 0 (forward) on rank 1") == 1 and "Traceback" not in text
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, inject=injections.memory_for, values=(2, 0, "forward", 1))
    assert "micro-batch 4 -> 2, accumulation 1 -> 2" in text
    assert close(sessions.logged(reference), sessions.logged(tmp_path / "run"))
    record("out of memory on one rank of two", "micro-batch 4 does not fit", lost="nothing (losses within 1e-4)",
           after="exit code 5 on both; the next start took micro-batch 2")


# ---- processes that are lost ----

@pytest.mark.parametrize(("how", "said"), [
    ("dies", r"stopped: no sign of life from rank 1 since step \d .*; the others are in step 4"),
    ("hangs", r"stopped: rank 1 hangs in step 4 \(data\); nothing has moved for \d+ s \(--rank-timeout\)"),
    ("stops", r"stopped: no sign of life from rank 1 since step \d .*; the others are in step 4; nothing has moved"),
])
def test_a_lost_rank_is_named_and_the_run_goes_on(reference, tmp_path, how, said):
    ranks = sessions.start_ranks(tmp_path / "run", 2, *SMALL, "--rank-timeout", 2, inject=injections.lose_rank,
                                 values=(1, 4, how))
    assert ranks[0].wait() == 4
    assert len(re.findall(said, "".join(rank.text for rank in ranks))) == 1, [rank.text for rank in ranks]
    ranks[1].kill() if how == "stops" else ranks[1].wait()
    sessions.run_ranks(tmp_path / "run", 2, *SMALL)
    assert close(sessions.logged(reference), sessions.logged(tmp_path / "run"))
    record("a rank of two is lost", f"it {how}", lost="nothing (losses within 1e-4)",
           after="exit code 4, rank and step named; the same command went on")


def test_a_rank_that_fails_takes_the_others_along_with_its_code(tmp_path):
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, inject=injections.lose_rank, values=(1, 4, "fails"), code=1)
    assert text.count("OSError: [Errno 5] Input/output error") == 1
    record("a rank of two fails", "an exception in its data", after="both left with exit code 1")


def close(one, other):
    """Two trajectories of losses agree within 1e-4."""
    return [a["step"] for a in one] == [b["step"] for b in other] and all(
        a["loss"] == pytest.approx(b["loss"], rel=1e-4) for a, b in zip(one, other))
