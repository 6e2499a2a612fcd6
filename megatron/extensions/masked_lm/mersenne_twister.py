"""64-bit Mersenne Twister (std::mt19937_64) and its shuffle, vectorised: numpy has neither."""

import numpy as np
from numpy.typing import NDArray

_STATE, _HALF = 312, 156  # words; a word depends on those 312, 311 and 156 before it
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_MULTIPLIER, _WORD = 6364136223846793005, (1 << 64) - 1
_WORD_32 = np.uint64(0xFFFFFFFF)
_TEMPERING = (
    (np.right_shift, 29, 0x5555555555555555),
    (np.left_shift, 17, 0x71D67FFFEDA60000),
    (np.left_shift, 37, 0xFFF7EEE000000000),
    (np.right_shift, 43, _WORD),
)


def mt19937_64(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first `count` outputs of std::mt19937_64.

    Source: Nishimura, "Tables of 64-bit Mersenne Twisters", 2000.
    """
    words = np.empty(_STATE + -(-count // _HALF) * _HALF, np.uint64)
    words[:_STATE] = _initial_state(seed)
    one, scratch, twist = np.uint64(1), np.empty(_HALF, np.uint64), np.empty(_HALF, np.uint64)
    for i in range(_STATE, len(words), _HALF):
        first = i - _STATE
        np.bitwise_and(words[first : first + _HALF], _UPPER, out=twist)
        np.bitwise_and(words[first + 1 : first + 1 + _HALF], _LOWER, out=scratch)
        np.bitwise_or(twist, scratch, out=twist)
        np.bitwise_and(twist, one, out=scratch)
        np.multiply(scratch, _MATRIX, out=scratch)
        np.right_shift(twist, one, out=twist)
        np.bitwise_xor(twist, scratch, out=twist)
        np.bitwise_xor(words[i - _HALF : i], twist, out=words[i : i + _HALF])
    outputs = words[_STATE : _STATE + count]
    for shift, bits, mask in _TEMPERING:
        outputs ^= shift(outputs, np.uint64(bits)) & np.uint64(mask)
    return outputs


def shuffled_order(seed: int, count: int) -> NDArray[np.int64]:
    """Return the order of `count` rows after a Fisher-Yates shuffle by std::mt19937_64.

    For i from `count` - 1 down to 1, rows i and j_i = output mod (i + 1) change places. Which row
    comes to i in the end follows from the last swap that wrote j_i before, and so on back to the
    first: chains of pointers, which are followed for all rows at once.

    Raises:
        ValueError: there are 2^32 rows or more.

    Shapes: -> [count] int64.
    """
    if count >= 1 << 32:
        raise ValueError(f"{count} rows: the shuffle has room for {(1 << 32) - 1}")
    indices = np.arange(count)
    key = np.zeros(count, np.uint64)  # j_i above, i below: sorted, the swaps of a row by time
    key[1:] = mt19937_64(seed, max(count - 1, 0))[::-1]
    np.remainder(key, (indices + 1).view(np.uint64), out=key)
    partner = key.astype(np.int64)
    key <<= np.uint64(32)
    key |= indices.view(np.uint64)
    key.sort()
    swap = (key & _WORD_32).view(np.int64)
    key >>= np.uint64(32)
    row = key.view(np.int64)
    # The value at i when its turn comes: from the last swap with j = i, if there was one.
    root = indices.copy()
    root[row[::-1]] = swap[::-1]  # of several, the last assignment stays, for the lowest i
    # The swap before (of a higher i) that wrote the same row; -1 if there was none.
    previous = np.full(count, -1)
    follows = np.flatnonzero(row[1:] == row[:-1])
    previous[swap[follows]] = swap[follows + 1]
    del key, row, swap, follows
    # A swap of a row with itself brings nothing.
    itself = np.flatnonzero(partner == indices)
    fixed_points = itself[root[itself] == itself]
    root[fixed_points] = np.where(previous[fixed_points] < 0, fixed_points, previous[fixed_points])
    previous[itself] = itself
    while not np.array_equal(further := root.take(root), root):
        root = further
    return np.where(previous < 0, partner, root[previous])


def _initial_state(seed: int) -> NDArray[np.uint64]:
    state = [seed & _WORD]
    for i in range(1, _STATE):
        state.append((_MULTIPLIER * (state[-1] ^ (state[-1] >> 62)) + i) & _WORD)
    return np.array(state, np.uint64)
