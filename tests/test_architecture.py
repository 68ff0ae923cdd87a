"""The layout's promises: imports go one way, nothing heavy is imported unasked, files and functions stay small."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("dit", "scripts") for path in (ROOT / folder).rglob("*.py")) + [
    ROOT / "train.py", ROOT / "sample.py"]

# From the bottom up: a module may import from the layers below its own.
LAYERS = [
    {"config"},
    {"config_checks", "config_files", "terminal", "randomness", "local_shards", "low_bit", "cache_folder",
     "open_files"},
    {"model", "diffusion", "codec", "ema", "host_ema", "optim", "precision", "tensor_parallel"},
    {"step", "images", "packed_images", "latents", "sampling", "sharded_checkpoint"},
    {"cli", "data", "parallel", "checkpoint", "metrics_memory", "extraction"},
    {"metrics", "run_folder", "pipeline", "pulse", "guards", "interruption", "sharding"},
    {"preview", "planner", "evaluation", "saving", "relief", "preflight_checks"},
    {"sharded_saving"},
    {"trainer"},
    {"trial", "report", "preflight"},
]
LATE = {"diffusers", "torch_fidelity", "matplotlib", "tyro", "rich", "accelerate", "sklearn", "tensorboard",
        "webdataset", "datasets", "torchao"}
NO_TORCH = ["dit.config", "dit.config_checks", "dit.config_files", "dit.cli", "dit.planner.hardware",
            "dit.planner.flops", "dit.planner.allocator", "dit.planner.compare"]


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(name: str) -> int:
    for level, names in enumerate(LAYERS):
        if name in names:
            return level
    raise AssertionError(f"dit/{name}.py has no layer; put it into the table in this test and into the README")


def part(path: Path) -> str:
    relative = path.relative_to(ROOT / "dit")
    return relative.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [path for path in SOURCES if ROOT / "dit" in path.parents],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = part(path)
    for other in {match[1] for module in imports(path) if (match := re.match(r"dit\.(\w+)", module))} - {own}:
        if (ROOT / "dit" / f"{other}.py").exists() or other == "planner":
            assert layer_of(other) < layer_of(own), f"{own} may not import {other}"


def test_planner_and_trainer_never_import_each_other():
    trainer = imports(ROOT / "dit" / "trainer.py")
    assert not any(module.startswith("dit.planner") for module in trainer)
    for path in (ROOT / "dit" / "planner").glob("*.py"):
        assert not any(module.startswith("dit.trainer") for module in imports(path)), path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_libraries_are_imported_where_they_are_used(path):
    assert not {module for module in imports(path, top_level_only=True) if module.split(".")[0] in LATE}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            limit = 100 if (path.name, node.name) == ("trainer.py", "train") else 60
            assert node.end_lineno - node.lineno < limit, node.name


def test_planning_parts_need_no_torch():
    code = ("import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {name}" for name in NO_TORCH))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_does_no_work():
    code = ("import os, sys; before = set(os.listdir('.'))\nimport dit.trainer, dit.pipeline, dit.report\n"
            "assert set(os.listdir('.')) == before\n"
            "assert 'matplotlib' not in sys.modules and 'rich' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
