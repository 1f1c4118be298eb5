"""Streams of counter-based random numbers: what is drawn for one purpose is never drawn again."""

import numpy as np

from layerskip.ops.reference import UNIFORM_BITS

SAMPLING_STREAM = 0
ACCEPTANCE_STREAM = 1
RESIDUAL_STREAM = 2


def stream_bits(seed: int, position: int, stream: int, count: int) -> np.ndarray:
    """24-bit integers: ``reference.uniform_bits``, with the stream as the counter's third word."""
    source = np.random.Philox(counter=[0, position, stream, 0], key=[seed, 0])
    words = np.asarray(source.random_raw((count + 1) // 2))
    return words.astype("<u8", copy=False).view("<u4")[:count] >> (32 - UNIFORM_BITS)


def uniforms_of(bits: np.ndarray) -> list[float]:
    """Numbers in (0, 1), the midpoints of 2**24 intervals."""
    return ((bits + 0.5) * 2.0**-UNIFORM_BITS).tolist()
