"""scripts/plan.py's answers beyond a single plan: advice, scaling, side by side, and one line for every mistake."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from dit.cli import train_config
from dit.config import UsageError

ROOT = Path(__file__).parents[1]
SMALL = ["--model", "custom", "--hidden-size", "128", "--depth", "2", "--num-heads", "4", "--patch-size", "2", "--data",
         "synthetic", "--global-batch-size", "64", "--max-steps", "1000"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plan_script", ROOT / "scripts" / "plan.py")
    module = sys.modules["plan_script"] = importlib.util.module_from_spec(spec)  # flags' types are looked up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def said(script, capsys):
    """What the command prints."""
    def run(*flags):
        assert script.main([*SMALL, *flags]) == 0
        return capsys.readouterr().out

    return run


def test_advice_ends_with_the_line_to_paste(said):
    text = said("--recommend", "--goal", "quick", "--device", "RTX-4090", "--device", "A100", "--max-devices", "4")
    last = text.strip().splitlines()[-1]
    assert last.startswith(("python train.py ", "torchrun --nproc_per_node="))
    config = train_config(shlex.split(last.split("train.py ")[1]), prog="train.py")
    assert config.memory.global_batch_size == 64 and config.run.max_steps == 1000
    assert "the trade-offs left of" in text and "the fastest of what keeps the limits" in text
    assert "assumption" in text or "RunPod" in text, "where the price is from"


def test_advice_as_json_and_with_given_prices(said):
    text = said("--recommend", "--device", "RTX-4090", "--device", "A100", "--price", "A100=0.01", "--json")
    found = json.loads(text)
    chosen = found["rows"][found["choice"]]
    assert chosen["device"] == "NVIDIA A100-SXM4-80GB" and chosen["verdict"] == "fits"
    hours = chosen["hours"]["mid"] * chosen["num_devices"]
    assert chosen["cost"]["mid"] == pytest.approx(0.01 * hours)
    assert found["torchrun"] == chosen["torchrun"] and found["holds"] and found["reasons"]


def test_a_limit_that_cannot_be_kept_is_said_with_what_to_relax(said):
    text = said("--recommend", "--device", "T4", "--max-devices", "1", "--max-hours", "0.0001")
    line = next(line for line in text.splitlines() if line.startswith("NOT within the limits"))
    needed = line.rsplit("--max-hours ", 1)[1].split()[0].rstrip(";")
    assert "NOT within" not in said("--recommend", "--device", "T4", "--max-devices", "1", "--max-hours", needed)


def test_scaling_prints_both_tables_and_where_communication_shows(said):
    text = said("--scaling", "--device", "RTX-4090", "--price-per-device-hour", "0.5")
    assert "strong scaling" in text and "weak scaling" in text and "1,024" in text
    assert "Communication shows" in text and "pcie4-box" in text and "8 devices give" in text
    found = json.loads(said("--scaling", "--device", "A100", "--node", "hgx-h100", "--json"))
    assert [each["num_devices"] for each in found["strong"]] == [2**power for power in range(11)]
    assert found["strong"][7]["step_seconds"] is None and "hgx-h100" in found["node"]
    assert found["weak"][10]["global_batch"] == 64 * 1024


def test_a_plan_tells_energy_and_what_devices_exchange(said):
    text = said("--device", "H100", "--num-devices", "16", "--price", "H100=2.5")
    assert "energy at full power" in text and "kWh" in text and "cost" in text
    content = json.loads(said("--device", "H100", "--num-devices", "16", "--price", "H100=2.5", "--json"))
    run = content["run"]
    assert run["energy_kwh"] == pytest.approx(run["device_hours"] * 0.7)
    assert run["cost"] == pytest.approx(run["device_hours"] * 2.5)
    assert any("2 hgx-h100 nodes" in note for note in content["notes"])
    assert any("full 700 W" in note for note in content["notes"])


def test_configurations_side_by_side(said):
    text = said("--device", "RTX-4090", "--compare", "", "--amp", "--amp --ckpt")
    for word in ("(as given)", "--amp --ckpt", "memory in use (GiB)", "hours"):
        assert word in text


@pytest.mark.parametrize("flags, message", [
    (["--price", "H100"], "--price H100: must be a device and a number above 0"),
    (["--price", "H100=-2"], "--price H100=-2: must be"),
    (["--price", "H1000=2"], "--price H1000: unknown"),
    (["--price", "T4=2"], "--price T4=2 has no effect: Tesla T4 is not among the devices"),
    (["--price"], "--price needs a value"),
    (["--price-per-device-hour", "0"], "--price-per-device-hour 0.0: must be a number above 0"),
    (["--price-per-device-hour", "nan"], "--price-per-device-hour nan: must be"),
    (["--node", "hgx-h100"], "--node hgx-h100 goes with --scaling"),
    (["--scaling", "--node", "dgx-9"], "--node dgx-9: unknown; one of dgx-1"),
    (["--scaling", "--recommend"], "--recommend and --scaling are different questions"),
    (["--scaling", "--compare", "", "--amp"], "--scaling and --compare are different questions"),
    (["--scaling", "--num-devices", "3"], "--global-batch-size 64 is not divisible"),
    (["--compare", "--amp"], "--compare needs two or more"),
    (["--compare", "", "--amq"], "--amq"),
    (["--max-hours", "10"], "--max-hours 10.0 goes with --recommend"),
    (["--goal", "quick"], "--goal quick goes with --recommend"),
    (["--recommend", "--goal", "speed"], "--goal"),
    (["--recommend", "--num-devices", "4"], "--num-devices 4: --recommend chooses it; --max-devices limits it"),
    (["--recommend", "--max-hours", "-1"], "--max-hours -1.0: must be above 0"),
    (["--recommend", "--max-cost", "0"], "--max-cost 0.0: must be above 0"),
    (["--recommend", "--max-devices", "0"], "--max-devices 0: must be above 0"),
    (["--recommend", "--max-devices", "5000"], "--max-devices 5000: at most 1024"),
    (["--recommend", "--max-hours", "soon"], "--max-hours"),
    (["--recommend", "--device", "GB200"], "no price is known for NVIDIA GB200"),
    (["--parallel", "fsdp", "--shard-size", "3", "--num-devices", "8"], "--shard-size 3 does not divide the 8 devices"),
])
def test_mistakes_are_one_line(script, capsys, flags, message):
    with pytest.raises(UsageError) as error:
        script.main([*SMALL, "--device", "H100", *flags])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert capsys.readouterr().out == ""
