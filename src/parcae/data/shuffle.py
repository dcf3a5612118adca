"""Shuffles that need no memory: a keyed permutation, evaluated where it is asked for.

A Feistel network permutes the smallest square power of two that holds all positions; what lands
outside is sent through again until it lands inside (cycle walking). So the order of a corpus of
hundreds of millions of documents costs nothing to keep and any block of it can be computed alone.
Only 64-bit integer arithmetic is used: the order is the same on every machine and with every
version of numpy, which its random generators do not promise.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def key(*parts: int | str) -> int:
    """64 bits that stand for these parts: `key(seed, "rows", epoch, block)`."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(positions: np.ndarray, count: int, key: int) -> np.ndarray:
    """Where the permutation of 0 .. count - 1 with this key sends the positions."""
    half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    sent = np.asarray(positions).astype(np.uint64)
    if key & 1 and count > 1:  # Feistel networks are even permutations: swap 0 and 1 for the odd
        sent = np.where(sent < 2, sent ^ np.uint64(1), sent)
    sent = _feistel(sent, half_bits, key)
    outside = np.flatnonzero(sent >= count)
    while len(outside):
        sent[outside] = _feistel(sent[outside], half_bits, key)
        outside = outside[sent[outside] >= count]
    return sent.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.uint64, key: int) -> np.ndarray:
    left = values >> half_bits
    right = values & np.uint64((1 << int(half_bits)) - 1)
    for number in range(1, ROUNDS + 1):
        round_key = np.uint64((key + number * _GOLDEN) & _WORD)
        left, right = right, left ^ (_mix(right ^ round_key) >> (np.uint64(64) - half_bits))
    return (left << half_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, in place: every input bit moves every output bit."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
