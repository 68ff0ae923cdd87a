"""A run's folder: its name, its lock, and what it takes to continue what is in it."""

import json
import os

import pytest
import sessions
from test_resume import SMALL

from dit.config import UsageError, replace
from dit.config_files import load_toml, to_tree
from dit.parallel import Ranks
from dit.run_folder import Log, RunFolder, changed_settings, check_resumable, environment, open_run

TINY = load_toml(sessions.ROOT / "configs" / "tiny.toml")


@pytest.fixture
def ranks():
    import torch

    return Ranks(0, 0, 1, torch.device("cpu"))


def test_new_runs_are_numbered(tmp_path, ranks):
    config = replace(TINY, results_dir=str(tmp_path / "results"))
    names = [open_run(config, ranks).path.name for _ in range(3)]
    (tmp_path / "results" / "041-DiT-S-2").mkdir()
    assert names == ["000-custom", "001-custom", "002-custom"]
    assert open_run(config, ranks).path.name == "042-custom"


def test_a_results_folder_that_cannot_be_made_is_named(tmp_path, ranks):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--results-dir .*/file: cannot be written \((Not a directory|File exists)\)"):
        open_run(replace(TINY, results_dir=str(tmp_path / "file")), ranks)


def test_a_folder_of_another_run_is_refused_with_both_values(tmp_path):
    sessions.run(tmp_path / "run", *SMALL, "--max-steps", 1)
    text = sessions.run(tmp_path / "run", *SMALL, "--global-seed", 7, "--patch-size", 4, "--no-flip", code=2)
    said = (f"train.py: error: --run-dir {tmp_path / 'run'} holds another run: --patch-size was 2, now 4; "
            "--global-seed was 0, now 7; --flip was True, now False. Give the same settings, or another folder\n")
    assert said in text


def test_harmless_differences_need_to_be_asked_for(tmp_path):
    folder = tmp_path / "run"
    sessions.run(folder, *SMALL, "--max-steps", 2)
    other = (*SMALL, "--global-batch-size", 4, "--optimizer", "adamw-foreach", "--lr", 2e-3, "--max-steps", 3)
    text = sessions.run(folder, *other, code=2)
    assert "--global-batch-size was 8, now 4; --optimizer was adamw, now adamw-foreach" in text
    assert "or --resume-anyway" in text and "--lr" not in text
    text = sessions.run(folder, *other, "--resume-anyway")
    assert "changed since the last session: --global-batch-size was 8, now 4" in text
    assert "changed since the last session: --lr was 0.001, now 0.002" in text and "step 2 of 3, 1 to go" in text
    sessions.run(folder, *other, code=0)


def test_fixed_settings_are_never_resumed_anyway():
    changed = replace(TINY, global_seed=1, resume_anyway=True)
    with pytest.raises(UsageError, match="--global-seed was 0, now 1. Give the same settings, or another folder$"):
        check_resumable(changed, TINY, "run")
    check_resumable(replace(TINY, augment="resize", resume_anyway=True), TINY, "run")
    assert changed_settings(changed, TINY) == ["--global-seed was 0, now 1"] and changed_settings(TINY, None) == []


def test_a_settings_file_that_is_damaged_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.saved_config() is None
    (tmp_path / "config.json").write_text('{"model": ')
    with pytest.raises(UsageError, match=r"config.json: not readable \("):
        folder.saved_config()
    folder.write_json("config.json", to_tree(TINY))
    assert folder.saved_config() == TINY


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_json("a.json", {"old": 1})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="could not write .*a.json: No space left on device"):
        folder.write_json("a.json", {"new": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1} and len(list(tmp_path.iterdir())) == 1


def test_a_line_is_printed_although_the_log_cannot_be_written(tmp_path, capsys):
    Log(RunFolder(tmp_path / "missing"))("the message")
    Log(RunFolder(tmp_path))("the other")
    assert capsys.readouterr().out == "the message\nthe other\n"
    assert (tmp_path / "log.txt").read_text().endswith("  the other\n")


def test_the_environment_says_what_a_result_depends_on(ranks):
    found = environment(ranks.device, 1)
    assert found["versions"]["torch"] and found["device"] and found["python"] and found["num_devices"] == 1


def test_a_world_size_that_does_not_divide_the_batch_is_refused(tmp_path):
    text = sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--global-batch-size", 9, code=2)
    assert "--global-batch-size 9 is not divisible by 2 devices x --grad-accum 1 = 2; 8 would be" in text
