"""Priors of attention: what is published of a generation is what a plan takes, and "faster" means it there."""

import pytest

from dit.planner.hardware import find_device
from dit.planner.op_class import Work
from dit.planner.priors import attention_seconds, device_seconds, rates

SHORT, LONG = (256 * 16, 256, 64), (64 * 16, 1024, 64)


def speed(name, kernel, size, dtype="bf16"):
    return 1 / attention_seconds(kernel, dtype, size, rates(find_device(name), tf32=True))


def test_cudnn_is_faster_on_hopper_beyond_256_tokens_only():
    assert speed("H100", "cudnn", LONG) > 1.1 * speed("H100", "flash", LONG)
    assert speed("H100", "cudnn", SHORT) == speed("H100", "flash", SHORT)
    assert speed("A100", "cudnn", LONG) == speed("A100", "flash", LONG)


@pytest.mark.parametrize("name", ["A100", "H100", "RTX-4090"])
@pytest.mark.parametrize("size", [SHORT, LONG])
def test_flash_beats_efficient_and_half_beats_full(name, size):
    assert speed(name, "flash", size) > speed(name, "efficient", size)
    assert speed(name, "efficient", size) > speed(name, "efficient", size, "fp32")


def test_published_forward_rates_come_out():
    """FlashAttention-3 paper: H100, head size 64, without a mask, 512 tokens: 282 TFLOP/s, cuDNN 335."""
    rows, tokens, head_size = 2048, 512, 64
    flops = 4 * rows * tokens**2 * head_size
    for kernel, published in (("flash", 282e12), ("cudnn", 335e12)):
        work = Work(f"_scaled_dot_product_{kernel}_attention bfloat16", "attention forward", (rows, tokens, head_size),
                    flops, 0)
        seconds, is_compute = device_seconds(work, rates(find_device("H100"), tf32=True))
        assert is_compute and flops / seconds == pytest.approx(published, rel=0.03)


def test_head_sizes_are_padded_to_what_a_kernel_has():
    rate = {head: head * speed("A100", "flash", (4096, 256, head)) for head in (64, 72, 96)}
    assert rate[72] < 0.8 * rate[64] and rate[96] == pytest.approx(rate[64], rel=0.01)
