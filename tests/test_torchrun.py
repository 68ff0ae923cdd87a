"""torchrun as a user types it, and its restarts: two agents on one machine, one of them killed and started again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import sessions
from faultlog import record
from test_resume import SMALL

from dit.metrics import read_metrics

ROOT = sessions.ROOT
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torch 2.14 tells a node that joins later nothing of where rank 0 is (docs/multinode.md)."""


def agent(port: int, log, folder, hosts: bool) -> subprocess.Popen:
    """One node's torchrun with one process. ``hosts``: the meeting point lives here."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max-restarts=3",
               "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(hosts)}",
               "--rdzv-id=job", "--local-addr=127.0.0.1",
               "--monitor-interval=0.2", str(ROOT / "train.py"), *sessions.TINY, "--run-dir", str(folder),
               *map(str, SMALL), "--max-steps", "60", "--keep-last", "0"]
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT,
                            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def kill_node(process: subprocess.Popen) -> None:
    """End an agent and its process, as a node does that loses its power; neither can say good-bye."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        children = [int(pid) for pid in file.read().split()]
    for pid in (process.pid, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_the_command_that_the_tiny_config_gives(tmp_path):
    """As it stands in the file's first line: the plan is made, and two ranks train in bf16."""
    said = (ROOT / "configs" / "tiny.toml").read_text().splitlines()[0].removeprefix("# ").split()
    assert said[0] == "torchrun" and "--amp" in said
    command = [sys.executable, "-m", "torch.distributed.run", *said[1:], "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(20)) and steps[-1]["loss"] < steps[0]["loss"]
    assert "bf16" in done.stdout and (tmp_path / "run" / "plan.json").exists()


def test_a_trial_of_two_ranks_holds_each_one_s_memory_against_its_plan(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", "--config",
               "configs/tiny.toml", "--hidden-size", "256", "--run-dir", str(tmp_path / "run"), "--trial",
               "--trial-steps", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    rows = {row["quantity"]: row for row in json.loads((tmp_path / "run" / "trial.json").read_text())["rows"]}
    assert rows["peak_allocated_bytes"]["ratio"] == pytest.approx(1, abs=0.01)
    assert rows["device_used_bytes"]["within"] is True


@pytest.mark.timeout(280)
def test_a_node_that_is_killed_and_started_again_continues_the_run(tmp_path):
    folder, port = tmp_path / "run", sessions.free_port()
    files = [open(tmp_path / f"agent{index}.log", "wb") for index in range(3)]  # noqa: SIM115 - closed below

    def text() -> str:
        return "".join((tmp_path / f"agent{index}.log").read_text() for index in range(3))

    def wait_for(number: int) -> None:
        end = time.monotonic() + 120
        while len(list((folder / "checkpoints").glob("*.pt")) if folder.exists() else []) < number:
            assert time.monotonic() < end, text()
            time.sleep(0.05)

    first = agent(port, files[0], folder, hosts=True)
    second = agent(port, files[1], folder, hosts=False)
    agents = [first, second]
    try:
        wait_for(2)
        kill_node(second)
        killed = time.monotonic()
        agents.append(agent(port, files[2], folder, hosts=False))
        assert first.wait(timeout=120) == 0 and agents[2].wait(timeout=60) == 0, text()
        seconds = time.monotonic() - killed
    finally:
        for process in agents:
            if process.poll() is None:
                kill_node(process)
        for file in files:
            file.close()
    assert [record["step"] for record in sessions.logged(folder)] == list(range(60))
    resumed = [line for line in text().splitlines() if " of 60, " in line and "to go" in line]
    assert len(resumed) >= 2 and resumed[0] == "step 0 of 60, 60 to go" and resumed[-1] != resumed[0]
    sessions.run(tmp_path / "whole", *SMALL, "--max-steps", 60)
    losses = [[record["loss"] for record in sessions.logged(run)] for run in (folder, tmp_path / "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    record("a node of two dies and comes back", "SIGKILL of torchrun and its process, a new torchrun", seconds=seconds,
           after="the other node waited and both went on", lost="nothing (losses within 1e-3)")
