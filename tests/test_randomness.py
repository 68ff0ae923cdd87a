"""A sample's numbers are functions of (seed, stream, position) alone."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.randomness import STREAM_NOISE, STREAM_POSTERIOR, EndlessOrder, normals, random_words, scalars, uniforms

SHAPES = [(4, 32, 32), (1, 8, 8), (1,), (3,), (65,), (3, 7, 5), (130,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_normals_are_bitwise_the_same_however_positions_are_grouped(shape):
    positions = np.array([5, 6, 7, 8, 20, 3, 4, 10**12, 10**12 + 1, 0])
    together = normals(3, STREAM_NOISE, positions, shape)
    one_by_one = np.concatenate([normals(3, STREAM_NOISE, positions[i:i + 1], shape) for i in range(len(positions))])
    in_sevens = np.concatenate([normals(3, STREAM_NOISE, positions[i:i + 7], shape) for i in (0, 7)])
    assert together.dtype == np.float32 and together.shape == (len(positions), *shape)
    assert together.tobytes() == one_by_one.tobytes() == in_sevens.tobytes()


def test_normals_do_not_depend_on_memory_alignment():
    """64 samples at once cross the chunk boundary; a view at an odd place must give the same bits."""
    positions = np.arange(100, 164)
    together = normals(0, STREAM_NOISE, positions, (4, 32, 32))
    backwards = normals(0, STREAM_NOISE, positions[::-1], (4, 32, 32))[::-1]
    assert together.tobytes() == np.ascontiguousarray(backwards).tobytes()


def test_normals_are_standard_normal():
    x = normals(0, STREAM_NOISE, np.arange(256), (4096,)).astype(np.float64).ravel()
    n = len(x)
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    for edge in (0.5, 1.0, 2.0, 3.0, 4.0):
        share = math.erfc(edge / math.sqrt(2))
        assert abs((np.abs(x) > edge).mean() - share) < 4 * math.sqrt(share / n)


def test_streams_seeds_positions_and_halves_are_uncorrelated():
    base = normals(0, STREAM_NOISE, np.arange(64), (4096,)).ravel()
    others = {
        "stream": normals(0, STREAM_POSTERIOR, np.arange(64), (4096,)).ravel(),
        "seed": normals(1, STREAM_NOISE, np.arange(64), (4096,)).ravel(),
        "position": normals(0, STREAM_NOISE, np.arange(1, 65), (4096,)).ravel(),
        "halves": np.roll(base.reshape(64, 2, 2048), 1, axis=1).ravel(),
    }
    for name, other in others.items():
        assert abs(np.mean(base * other)) < 4.5 / math.sqrt(base.size), name


def test_known_numbers():
    """A change here changes every run: Philox4x64-10 as numpy has it, key (7, stream), counter from position * words /
    4.
    """
    expected = np.random.Philox(key=7 | (STREAM_NOISE << 64), counter=30).random_raw(8)
    assert random_words(7, STREAM_NOISE, np.array([15]), 8).tolist() == [expected.tolist()]


def test_scalars_cover_their_ranges():
    drawn = scalars(0, np.arange(100_000), 1000, 0.1)
    assert drawn.timesteps.min() == 0 and drawn.timesteps.max() == 999
    counts = np.bincount(drawn.timesteps, minlength=1000)
    assert abs(((counts - 100) ** 2 / 100).sum() - 999) < 5 * math.sqrt(2 * 999)
    assert abs(drawn.drops.mean() - 0.1) < 0.005 and abs(drawn.flips.mean() - 0.5) < 0.01
    assert drawn.crops.min() >= 0 and drawn.crops.max() < 1
    assert not scalars(0, np.arange(1000), 1000, 0.0).drops.any() and scalars(0, np.arange(1000), 1000, 1.0).drops.all()
    one = scalars(0, np.array([77]), 1000, 0.1)
    assert all(np.array_equal(a[0], b[77]) for a, b in zip(one, drawn, strict=True))


def test_uniforms_stay_below_one():
    assert uniforms(np.array([2**64 - 1], dtype=np.uint64))[0] < 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 64, 65, 1797, 100_003])
def test_every_index_exactly_once_per_epoch(n):
    order = EndlessOrder(n, seed=0)
    epochs = order(np.arange(3 * n)).reshape(3, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    if n > 4:
        assert not (epochs[0] == epochs[1]).all() and not (epochs[0] == np.arange(n)).all()


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_order_is_a_permutation_in_any_epoch(n, seed, epoch):
    indices = EndlessOrder(n, seed)(np.arange(n) + epoch * n)
    assert len(np.unique(indices)) == n and indices.min() == 0 and indices.max() == n - 1


def test_order_looks_random():
    n = 10_000
    order = EndlessOrder(n, seed=1)(np.arange(20 * n)).reshape(20, n)
    assert abs(np.corrcoef(order[0], np.arange(n))[0, 1]) < 4.5 / math.sqrt(n)
    assert abs(np.corrcoef(order[0], order[1])[0, 1]) < 4.5 / math.sqrt(n)
    assert abs(np.corrcoef(order[0][1:], order[0][:-1])[0, 1]) < 4.5 / math.sqrt(n)
    fixed = (order == np.arange(n)).sum()  # 1 expected per epoch
    assert fixed < 20 + 5 * math.sqrt(20)
    first = EndlessOrder(3, seed=0)(np.arange(6 * 3000)).reshape(-1, 3)
    patterns, counts = np.unique(first, axis=0, return_counts=True)
    assert len(patterns) == 6 and (abs(counts - 1000) < 5 * math.sqrt(1000)).all()


def test_order_costs_no_memory_and_no_time_far_out():
    order = EndlessOrder(14_000_000, seed=0)
    far = order(np.arange(64) + 10**15)
    assert len(np.unique(far)) == 64 and far.max() < 14_000_000
