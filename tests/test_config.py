"""Settings: what is read, what is refused, and that every refusal is one line that names the flag or file."""

import json

import pytest

from dit.cli import parse_flags, settle, take_flag, take_flags, train_config
from dit.config import PRESETS, TrainConfig, UsageError, replace
from dit.config_checks import validate
from dit.config_files import from_tree, load_toml, to_tree

SYNTHETIC = replace(TrainConfig(), data="synthetic")


def test_every_preset_has_the_papers_size():
    assert len(PRESETS) == 12
    assert PRESETS["DiT-XL/2"] == {"depth": 28, "hidden_size": 1152, "patch_size": 2, "num_heads": 16}
    assert PRESETS["DiT-S/8"] == {"depth": 12, "hidden_size": 384, "patch_size": 8, "num_heads": 6}


def test_official_flags_and_toggles_are_read():
    config = train_config(
        ["--data", "synthetic", "--results-dir", "out", "--model", "DiT-B/4", "--image-size", "512", "--num-classes",
         "10", "--epochs", "3", "--global-batch-size", "64", "--global-seed", "7", "--vae", "mse", "--num-workers", "2",
         "--log-every", "5", "--ckpt-every", "6", "--amp", "--ckpt", "--no-tf32", "--grad-accum", "2"], prog="train.py")
    assert config.run.results_dir == "out" and config.run.epochs == 3 and config.run.global_seed == 7
    assert (config.run.log_every, config.run.ckpt_every) == (5, 6)
    assert config.shape.hidden_size == 768 and config.shape.input_size == (64, 64) and config.shape.num_classes == 10
    assert config.precision.amp and not config.precision.tf32 and config.checkpointed_blocks == 12
    assert config.vae == "mse" and config.micro_batch(4) == 8


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nmodel = "DiT-S/2"\nimage_size = [256, 128]\n'
                    '[data]\ndata = "synthetic"\n[optim]\nlr = 1\n')
    config = train_config(["--config", str(path), "--lr", "0.5"], prog="train.py")
    assert config.optim.lr == 0.5 and config.model.model == "DiT-S/2" and config.image_hw == (256, 128)
    assert config.run == TrainConfig().run


def test_the_tree_in_files_gives_the_same_settings_back():
    config = replace(SYNTHETIC, image_size=(256, 128), amp=True, ckpt=True, ckpt_blocks=3, max_steps=9)
    assert from_tree(json.loads(json.dumps(to_tree(config))), TrainConfig(), "config.json") == config


def test_rectangles_unlabelled_and_pixel_space_shapes():
    assert replace(SYNTHETIC, image_size=(512, 256)).shape.input_size == (64, 32)
    unlabelled = replace(SYNTHETIC, num_classes=0).shape
    assert unlabelled.num_classes == 0 and unlabelled.class_dropout_prob == 0
    pixels = replace(SYNTHETIC, vae="none", image_size=32).shape
    assert (pixels.in_channels, pixels.input_size, pixels.num_tokens) == (3, (32, 32), 256)


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "DiT-X/2"}, ["--model DiT-X/2", "unknown"]),
    ({"model": "custom", "depth": 2}, ["--model custom", "--hidden-size", "--patch-size"]),
    ({"image_size": 100}, ["--image-size 100", "multiple of 8"]),
    ({"image_size": 8, "vae": "none", "model": "DiT-S/8", "patch_size": 3}, ["--image-size 8", "patches of 3"]),
    ({"hidden_size": 100, "num_heads": 16}, ["--hidden-size 100", "--num-heads 16"]),
    ({"image_size": 0}, ["--image-size 0", "above 0"]),
    ({"lr": -1.0}, ["--lr -1.0", "above 0"]),
    ({"lr": float("nan")}, ["--lr nan", "finite"]),
    ({"global_batch_size": 0}, ["--global-batch-size 0", "above 0"]),
    ({"grad_accum": -2}, ["--grad-accum -2", "above 0"]),
    ({"max_steps": 0}, ["--max-steps 0", "above 0"]),
    ({"clip_grad": -1.0}, ["--clip-grad -1.0", "negative"]),
    ({"num_classes": -1}, ["--num-classes -1", "negative"]),
    ({"ema_decay": 1.0}, ["--ema-decay 1.0", "below 1"]),
    ({"class_dropout_prob": 1.5}, ["--class-dropout-prob 1.5"]),
    ({"ckpt_blocks": 3}, ["--ckpt-blocks 3", "--ckpt"]),
    ({"ckpt": True, "ckpt_blocks": 29}, ["--ckpt-blocks 29", "28 blocks"]),
    ({"amp_dtype": "bf16"}, ["--amp-dtype bf16", "--amp"]),
    ({"encode_chunk": 4}, ["--encode-chunk 4", "no effect"]),
    ({"data_path": "x"}, ["--data-path x", "no effect"]),
    ({"data": "digits"}, ["--data digits", "8x8"]),
    ({"data": "digits", "image_size": 8, "model": "DiT-S/2", "num_classes": 11}, ["--num-classes 11", "10"]),
    ({"trial": True, "plan": "off"}, ["--trial", "--plan off"]),
])
def test_what_cannot_be_is_refused_in_one_line(changes, words):
    with pytest.raises(UsageError) as refused:
        validate(replace(SYNTHETIC, **changes))
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(("text", "words"), [
    ("[optim]\nlrr = 1", ["optim.lrr", "did you mean lr?"]),
    ("lr = 1", ["lr belongs under [optim]"]),
    ("[optimizer]\nlr = 1", ["[optimizer]", "optim"]),
    ("[optim]\nlr = 'fast'", ["optim.lr", '"fast"', "float"]),
    ("[precision]\namp = 1", ["precision.amp", "bool"]),
    ("[precision]\namp_dtype = 'fp8'", ["precision.amp_dtype", "'bf16'"]),
    ("[model]\nimage_size = [1, 2, 3]", ["model.image_size", "[height, width]"]),
    ("[model\n", ["not valid TOML"]),
])
def test_a_mistake_in_a_file_names_file_and_key(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        load_toml(path)
    assert "bad.toml" in str(refused.value) and "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match="nowhere.toml.*No such file"):
        load_toml("nowhere.toml")


def test_training_needs_a_data_path_and_planning_does_not():
    with pytest.raises(UsageError, match="--data folder needs --data-path"):
        train_config([], prog="train.py")
    assert settle(TrainConfig()).encodes_in_loop


@pytest.mark.parametrize(("args", "words"), [
    (["--lr", "abc"], ["--lr", "abc"]),
    (["--modl", "x"], ["--modl", "did you mean --model?"]),
    (["--amp-dtype", "fp8"], ["--amp-dtype", "fp8", "bf16"]),
    (["--max-steps"], ["--max-steps"]),
    (["--image-size", "1", "2", "3"], ["--image-size"]),
])
def test_a_mistyped_flag_is_one_line(args, words):
    with pytest.raises(UsageError) as refused:
        parse_flags(TrainConfig, args, SYNTHETIC, prog="train.py")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250
    assert all(word in str(refused.value) for word in words), refused.value


def test_help_teaches_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags(TrainConfig, ["--help"], TrainConfig(), prog="train.py")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for section in to_tree(TrainConfig()).values():
        for name in section:
            assert "--" + name.replace("_", "-") in text
    assert "torchrun" in text


def test_a_batch_that_does_not_divide_is_told_the_nearest_that_would():
    with pytest.raises(UsageError, match=r"--global-batch-size 100 .* 8 devices x --grad-accum 3 = 24; 96 would be"):
        replace(SYNTHETIC, global_batch_size=100, grad_accum=3).micro_batch(8)


def test_take_flag_splits_both_spellings_off():
    assert take_flag(["--a", "1", "--config", "x", "--b"], "--config") == ("x", ["--a", "1", "--b"])
    assert take_flag(["--config=y"], "--config") == ("y", [])
    with pytest.raises(UsageError, match="--config needs a value"):
        take_flag(["--config"], "--config")


def test_steps_come_from_the_first_of_trial_max_steps_and_epochs():
    config = replace(SYNTHETIC, epochs=2, global_batch_size=100)
    assert config.total_steps(1000) == 20
    assert replace(config, max_steps=7).total_steps(1000) == 7
    assert replace(config, max_steps=7, trial=True, trial_steps=5).total_steps(1000) == 5


def test_settling_leaves_the_official_vaes_alone():
    assert settle(SYNTHETIC) == SYNTHETIC


def test_a_flag_given_several_times_keeps_every_value():
    assert take_flags(["--device", "a", "--x", "--device=b"], "--device") == (["a", "b"], ["--x"])
