"""--ckpt-every-nth: which blocks run twice, nothing else changes; what the settings of memory and devices refuse."""

import pytest
import runs
import torch
from runs import ONE, TINY

from dit.config import UsageError, replace
from dit.config_checks import validate

DEEP = replace(TINY, depth=5)


def passes(config):
    """How often each block runs in a step, and what a run comes to."""
    parts, counts = runs.build(ONE, config), [0] * config.shape.depth
    for index, block in enumerate(parts.model.blocks):
        block.norm1.register_forward_hook(lambda *_, index=index: counts.__setitem__(index, counts[index] + 1))
    return counts, runs.run(ONE, config, 1, parts=parts), parts


@pytest.mark.parametrize(("toggles", "expected"), [
    ({}, [1, 1, 1, 1, 1]), ({"ckpt": True}, [2, 2, 2, 2, 2]), ({"ckpt": True, "ckpt_every_nth": 2}, [2, 1, 2, 1, 2]),
    ({"ckpt": True, "ckpt_every_nth": 3}, [2, 1, 1, 2, 1]), ({"ckpt": True, "ckpt_blocks": 2}, [2, 2, 1, 1, 1]),
])
def test_every_nth_block_runs_twice(toggles, expected):
    config = validate(replace(DEEP, **toggles))
    counts, result, parts = passes(config)
    assert counts == expected and config.checkpointed_blocks == sum(count - 1 for count in expected)
    plain = runs.run(ONE, DEEP, 1)
    assert result.steps == plain.steps
    assert all(torch.equal(result.weights[name], weight) for name, weight in plain.weights.items())


@pytest.mark.parametrize(("changes", "words"), [
    ({"ckpt_every_nth": 2}, "--ckpt-every-nth 2 goes with --ckpt"),
    ({"ckpt": True, "ckpt_every_nth": 2, "ckpt_blocks": 1}, "without --ckpt-blocks"),
    ({"ckpt": True, "ckpt_every_nth": 6}, "--ckpt-every-nth 6: the model has 5 blocks"),
    ({"ckpt": True, "ckpt_every_nth": 0}, "--ckpt-every-nth 0: must be above 0"),
    ({"shard_size": 2}, "--shard-size 2 has no effect without --parallel fsdp"),
    ({"shard_size": -1, "parallel": "fsdp"}, "--shard-size -1: must not be negative"),
    ({"tensor_parallel": 3}, "--tensor-parallel 3: must divide the model's 4 heads"),
    ({"tensor_parallel": 0}, "--tensor-parallel 0: must be above 0"),
    ({"parallel": "fsdp", "optimizer": "adamw-8bit"}, "--optimizer adamw-8bit works on whole tensors"),
    ({"parallel": "fsdp", "compile": True}, "--compile does not go with --parallel fsdp"),
])
def test_what_cannot_be_is_refused_in_one_line(changes, words):
    with pytest.raises(UsageError, match=words) as refused:
        validate(replace(DEEP, **changes))
    assert "\n" not in str(refused.value)
