"""Randomness as a pure function of (seed, stream, position), so that no generator state exists that could be lost.

Everything is drawn with Philox4x64-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"): the key is (seed, stream), the counter is position * blocks per sample. Each sample owns a fixed, equally
long range of counters, so a run of consecutive positions is one call and a sample's numbers do not depend on what is
drawn beside it.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Streams are part of the key: changing a number changes every run made with it.
STREAM_SCALARS, STREAM_NOISE, STREAM_POSTERIOR, STREAM_ORDER, STREAM_SYNTHETIC = range(1, 6)

_WORDS_PER_BLOCK = 4  # one Philox4x64 counter value gives four 64-bit words
_LANE = 64  # samples are padded to this many floats, so no SIMD remainder loop ever sees an element (see `normals`)
_CHUNK_WORDS = 1 << 16  # 512 KiB of words at a time keep the temporaries in the cache
_SCALAR_WORDS = 8
_MAX_SEED = 1 << 64


class Scalars(NamedTuple):
    """Per-sample draws of N positions."""

    timesteps: np.ndarray  # (N,) int64 in [0, num_timesteps)
    drops: np.ndarray  # (N,) bool, label dropped for classifier-free guidance
    flips: np.ndarray  # (N,) bool, mirror left-right
    crops: np.ndarray  # (N, 3) float64 in [0, 1): top, left, scale of a random crop


def random_words(seed: int, stream: int, positions: np.ndarray, words: int) -> np.ndarray:
    """Raw Philox words (N, words) uint64 of N positions; `words` is a multiple of 4."""
    assert words % _WORDS_PER_BLOCK == 0 and 0 <= seed < _MAX_SEED
    positions = np.asarray(positions, dtype=np.int64)
    out = np.empty((len(positions), words), dtype=np.uint64)
    key = seed | (stream << 64)
    starts = np.flatnonzero(np.diff(positions, prepend=positions[:1] - 2) != 1)
    for start, stop in zip(starts, [*starts[1:], len(positions)]):
        counter = int(positions[start]) * (words // _WORDS_PER_BLOCK)  # a Python int: the counter has 256 bits
        run = np.random.Philox(key=key, counter=counter).random_raw((stop - start) * words)
        out[start:stop] = run.reshape(stop - start, words)
    return out


def uniforms(words: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from the upper 53 bits of each word."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scalars(seed: int, positions: np.ndarray, num_timesteps: int, drop_prob: float) -> Scalars:
    """Time step, label drop, flip and crop of every position."""
    words = random_words(seed, STREAM_SCALARS, positions, _SCALAR_WORDS)
    timesteps = ((words[:, 0] >> np.uint64(32)) * np.uint64(num_timesteps)) >> np.uint64(32)
    return Scalars(
        timesteps=timesteps.astype(np.int64),
        drops=uniforms(words[:, 1]) < drop_prob,
        flips=(words[:, 2] >> np.uint64(63)).astype(bool),
        crops=uniforms(words[:, 3:6]),
    )


def normals(seed: int, stream: int, positions: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normals (N, *shape) float32 of N positions, by Box and Muller (1958).

    Bitwise the same however positions are grouped: every sample is padded to whole blocks of 64 floats, so a value's
    place inside a SIMD vector, and hence the code path of log, cos and sin that makes it, is a function of its index
    alone. The largest magnitude is sqrt(-2 ln 2^-32) = 6.66.
    """
    size = int(np.prod(shape))
    pairs = -(-size // (2 * _LANE)) * _LANE
    positions = np.asarray(positions, dtype=np.int64)
    out = np.empty((len(positions), 2, pairs), dtype=np.float32)
    chunk = max(1, _CHUNK_WORDS // pairs)
    for start in range(0, len(positions), chunk):
        _box_muller(random_words(seed, stream, positions[start:start + chunk], pairs), out[start:start + chunk])
    flat = out.reshape(len(positions), 2 * pairs)
    return np.ascontiguousarray(flat[:, :size]).reshape(len(positions), *shape)


def _box_muller(words: np.ndarray, out: np.ndarray) -> None:
    """(N, pairs) uint64 -> out (N, 2, pairs) float32."""
    integers = words.view(np.int32).reshape(out.shape)
    radius = (integers[:, 0] & np.int32(0x7FFFFFFF)).astype(np.float32)
    radius *= np.float32(2.0**-31)
    radius += np.float32(2.0**-32)  # (0, 1]: the logarithm never sees 0
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = integers[:, 1].astype(np.float32)
    angle *= np.float32(np.pi * 2.0**-31)  # [-pi, pi]
    np.multiply(np.cos(angle), radius, out=out[:, 0])
    np.multiply(np.sin(angle, out=angle), radius, out=out[:, 1])


class EndlessOrder:
    """The run's endless shuffled sequence: position -> index in [0, n), every index exactly once per epoch.

    Each epoch has its own pseudo-random permutation, evaluated pointwise and never stored: a Feistel network over the
    next power of two with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Position ten
    million costs as much as position 0, and fourteen million images cost no memory.
    """

    ROUNDS = 8

    def __init__(self, num_samples: int, seed: int):
        assert num_samples > 0
        self.num_samples = num_samples
        bits = max(2, (num_samples - 1).bit_length())
        self._right_bits = np.uint64(bits // 2)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._right_mask = np.uint64((1 << (bits // 2)) - 1)
        keys = random_words(seed, STREAM_ORDER, np.zeros(1, np.int64), _SCALAR_WORDS * 2)[0]
        self._epoch_key, self._round_keys = keys[0], keys[1:1 + self.ROUNDS]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Indices (N,) int64 of positions (N,)."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        keys = _mix(epochs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._epoch_key)
        values = self._permute(offsets.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = self._permute(values[outside], keys[outside])
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """A bijection of [0, 2^bits): xor each half in turn with a keyed hash of the other."""
        left, right = values >> self._right_bits, values & self._right_mask
        for index in range(0, self.ROUNDS, 2):
            left = left ^ (_mix(right + keys + self._round_keys[index]) & self._left_mask)
            right = right ^ (_mix(left + keys + self._round_keys[index + 1]) & self._right_mask)
        return (left << self._right_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014): a 64-bit hash; array arithmetic wraps by design."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
