"""What a user types: train.py, sample.py and evaluate.py end to end on a tiny model, and what they say to mistakes."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dit.config import UsageError
from dit.metrics import KEYS, read_metrics

ROOT = Path(__file__).parent.parent
TINY = ["--config", str(ROOT / "configs" / "tiny.toml"), "--plan", "off"]
train_main = runpy.run_path(str(ROOT / "train.py"))["main"]
sample_main = runpy.run_path(str(ROOT / "sample.py"))["main"]
evaluate_main = runpy.run_path(str(ROOT / "scripts" / "evaluate.py"))["main"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished tiny run."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert train_main([*TINY, "--run-dir", str(folder), "--sample-every", "20", "--keep-last", "0"]) == 0
    return folder


def test_a_run_is_a_folder_that_explains_itself(run):
    config, environment = (json.loads((run / name).read_text()) for name in ("config.json", "environment.json"))
    assert config["model"]["hidden_size"] == 64 and config["data"]["data"] == "digits"
    assert torch.__version__.startswith(environment["versions"]["torch"])
    assert environment["num_devices"] == 1 and environment["device"]
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(20))
    assert all(tuple(record) == KEYS for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    assert sum(record["peak_allocated_bytes"] is not None for record in records) >= 3
    assert sorted(path.name for path in (run / "checkpoints").glob("*.pt")) == ["0000010.pt", "0000020.pt"]
    assert (run / "samples" / "0000020.png").exists()
    log = (run / "log.txt").read_text()
    for words in ("micro-batch 16 x accumulation 1 x 1 devices = global batch 16", "TF32 off",
                  "0 of 2 blocks checkpointed", "step 0 of 20, 20 to go", "step 20/20"):
        assert words in log


def test_checkpoint_files_load_with_weights_only_and_have_bare_official_names(run):
    state = torch.load(run / "checkpoints" / "0000020.pt", weights_only=True)
    assert {"model", "ema", "opt", "scaler", "step", "config", "shape"} <= state.keys()
    assert state["model"].keys() == state["ema"].keys()
    name = "final_layer.linear.weight"
    assert {"x_embedder.proj.weight", "pos_embed", "blocks.1.attn.qkv.weight", name} <= state["ema"].keys()
    assert not torch.equal(state["model"][name], state["ema"][name])


def test_every_start_without_a_run_dir_makes_a_new_folder(tmp_path):
    for _ in range(2):
        train_main([*TINY, "--results-dir", str(tmp_path), "--max-steps", "1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000-custom", "001-custom"]


@pytest.mark.parametrize("toggles", [["--ckpt"], ["--amp"], ["--amp", "--amp-dtype", "fp16"], ["--grad-accum", "4"],
                                     ["--attention", "math"], ["--clip-grad", "0.1"], ["--ema", "off"],
                                     ["--optimizer", "adamw-foreach"], ["--no-learn-sigma"], ["--num-classes", "0"]])
def test_every_toggle_trains(tmp_path, toggles):
    folder = tmp_path / "run"
    assert train_main([*TINY, "--run-dir", str(folder), "--max-steps", "4", *toggles]) == 0
    assert all(record["loss"] is not None for record in read_metrics(folder / "metrics.jsonl"))


def test_samples_come_from_the_file_alone_and_seeds_name_them(run, tmp_path):
    ckpt = str(run / "checkpoints" / "0000020.pt")
    requests = {"a": ["--classes", "3", "7", "--seed", "5"],
                "b": ["--classes", "7", "--seed", "6", "--sampler", "ddim"],
                "c": ["--classes", "7", "--seed", "6", "--batch-size", "1"]}
    for folder, request in requests.items():
        assert sample_main(["--ckpt", ckpt, "--num-sampling-steps", "5", "--cfg-scale", "2", *request,
                            "--output", str(tmp_path / folder)]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["class0003-seed000005.png", "class0007-seed000006.png", "grid.png"]
    one, other, same = (Image.open(tmp_path / folder / "class0007-seed000006.png").tobytes() for folder in "abc")
    assert one != other
    assert max(abs(a - b) for a, b in zip(one, same, strict=True)) <= 1


def test_model_and_ema_weights_differ(run, tmp_path):
    ckpt = str(run / "checkpoints" / "0000020.pt")
    for weights in ("ema", "model"):
        sample_main(["--ckpt", ckpt, "--weights", weights, "--classes", "0", "--num-sampling-steps", "5",
                     "--output", str(tmp_path / weights)])
    assert (tmp_path / "ema" / "grid.png").read_bytes() != (tmp_path / "model" / "grid.png").read_bytes()


def test_evaluation_prints_a_share(run, capsys):
    assert evaluate_main(["--ckpt", str(run / "checkpoints" / "0000020.pt"), "--num-samples", "20",
                          "--num-sampling-steps", "2"]) == 0
    assert "% of 20 samples" in capsys.readouterr().out


# ---- mistakes ----

@pytest.mark.parametrize(("args", "words"), [
    (["--model", "DiT-Q/2"], ["--model DiT-Q/2"]),
    (["--global-batch-size", "7", "--grad-accum", "2"], ["--global-batch-size 7", "2"]),
    (["--data", "folder", "--vae", "none", "--data-path", "nowhere"], ["nowhere"]),
    (["--attention", "cudnn"], ["--attention cudnn", "GPU"]),
    (["--num-classes", "9"], ["--num-classes 9"]),
    (["--run-dir", "/proc/nowhere"], ["/proc/nowhere", "cannot be written"]),
])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        train_main([*TINY, "--max-steps", "1", *args])
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value
    assert not list(tmp_path.rglob("*.pt"))


def test_labels_outside_the_models_classes_are_refused_on_the_host(tmp_path):
    for label in ("a", "b", "c"):
        (tmp_path / "images" / label).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / label / "0.png")
    with pytest.raises(UsageError, match="--num-classes 2"):
        train_main([*TINY, "--data", "folder", "--vae", "none", "--data-path", str(tmp_path / "images"),
                    "--num-classes", "2", "--run-dir", str(tmp_path / "run")])


def test_an_unreadable_image_does_not_end_a_run(tmp_path, capsys):
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (10, 12), (9 * index, 0, 0)).save(tmp_path / "images" / label / f"{index}.png")
    (tmp_path / "images" / "a" / "3.png").write_bytes(b"not an image")
    assert train_main([*TINY, "--data", "folder", "--vae", "none", "--data-path", str(tmp_path / "images"),
                       "--num-classes", "2", "--run-dir", str(tmp_path / "run"), "--max-steps", "2"]) == 0


@pytest.mark.parametrize(("make", "words"), [
    (lambda path: None, "no such file"),
    (lambda path: path.write_bytes(b"PK garbage"), "not a checkpoint file"),
    (lambda path: torch.save({"x": torch.zeros(1)}, path), "not a checkpoint file"),
    (lambda path: path.mkdir(), "is a folder"),
])
def test_what_is_not_a_checkpoint_file_is_named(tmp_path, make, words):
    make(tmp_path / "x.pt")
    with pytest.raises(UsageError, match=words):
        sample_main(["--ckpt", str(tmp_path / "x.pt"), "--output", str(tmp_path / "out")])


def test_a_truncated_checkpoint_file_is_named(run, tmp_path):
    whole = (run / "checkpoints" / "0000020.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(UsageError, match="truncated"):
        sample_main(["--ckpt", str(tmp_path / "cut.pt"), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(("args", "words"), [
    (["--classes", "11"], "--classes 11"), (["--num-per-class", "0"], "--num-per-class 0"),
    (["--num-sampling-steps", "2000"], "2000"), (["--eta", "2", "--sampler", "ddim"], "--eta 2"),
    (["--vae", "ema"], "--vae ema"), (["--cfg-channels", "5"], "--cfg-channels 5"), (["--seed", "-1"], "--seed -1"),
])
def test_impossible_sampling_requests_are_refused(run, tmp_path, args, words):
    with pytest.raises(UsageError, match=words):
        sample_main(["--ckpt", str(run / "checkpoints" / "0000020.pt"), "--output", str(tmp_path), *args])


def test_the_command_line_exits_with_2_and_one_line(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--modl", "x"], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "train.py: error: Unrecognized options: --modl, x; did you mean --model?\n"
