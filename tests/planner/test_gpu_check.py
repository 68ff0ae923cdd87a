"""scripts/gpu_check.py, which has to work at the first try on a GPU: what it covers, and a whole row on this CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dit.config import UsageError

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_check  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")
ROW = """
import json, sys
sys.modules["diffusers"] = sys.modules["tyro"] = None
sys.path.insert(0, {scripts!r})
import gpu_check, torch
gpu_check.BY_CLASS = ("row",)
settings = gpu_check.BASE | dict(model="custom", depth=1, hidden_size=48, num_heads=2, patch_size=4, image_size=64,
                                 global_batch_size=4, grad_accum=2)
result = {{"rows": [], "failed": {{}}}}
gpu_check.run_one("row", settings, gpu_check.predict("cpu", "row", settings), torch.device("cpu"), result)
print(json.dumps(result))
"""


def test_the_matrix_covers_what_it_promises():
    cases = gpu_check.matrix()
    configs = [gpu_check.config_of(settings) for settings in cases.values()]
    assert len(cases) >= 24 and {gpu_check.SNAPSHOT_OF, *gpu_check.BY_CLASS} <= set(cases)
    assert {config.model.model[4:].split("/")[0] for config in configs} == {"S", "B", "L", "XL"}
    assert {config.model.model[-1] for config in configs} == {"2", "4", "8"}
    assert {"efficient", "flash", "cudnn", "math"} <= {config.precision.attention for config in configs}
    assert {0.0, 0.5, 1.0} <= {config.checkpointed_blocks / config.shape.depth for config in configs}
    assert any(config.memory.grad_accum > 1 for config in configs)


def test_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match="--only B/3: unknown"):
        gpu_check.chosen("B/3")


def test_a_row_without_diffusers_and_tyro():
    done = subprocess.run([sys.executable, "-c", ROW.format(scripts=str(SCRIPTS))], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == {}
    row, = result["rows"]
    assert row["ratios"]["peak_allocated_bytes"] == pytest.approx(1, abs=0.01)
    assert {"data", "encode", "forward", "backward", "optimizer", "ema"} == set(row["measured"]["seconds_by_phase"])
    assert row["seconds_by_class"]["gemm"]["measured"] > 0


def test_sizes_of_allocations_are_compared_as_the_allocator_rounds_them():
    found = gpu_check.compare_allocations([100_000, 200_000, 10], [100_100, 300_000, 300_000])
    assert found["predicted"] == 2 and found["recorded"] == 3
    assert found["only_predicted"] == {200_192: 1} and found["only_recorded"] == {300_032: 2}
