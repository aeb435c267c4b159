"""Blocks of 32 values that hold what other formats hold: Q5_0 in Q8_0, Q4_K in Q4_1.

The native library multiplies 4- and 8-bit groups of 32. Moved into those, a matrix keeps its codes
and takes a third to a half of what it would as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PIECE_BLOCKS = 1 << 12  # converted at once: what this makes on the way stays in the cache


@dataclass(frozen=True, slots=True)
class Conversion:
    """How blocks of a format become blocks of another one.

    Attributes:
        stored: the other format.
        block_bytes: of a block of the first one.
        convert: blocks [n, block_bytes] -> [n, bytes], whole blocks of the other format.
    """

    stored: str
    block_bytes: int
    convert: Callable[[Bytes], Bytes]


def q8_0_of_q5_0(blocks: Bytes) -> Bytes:
    """[n, 22] -> [n, 34], exact: d stays, codes 0..31 become -16..15.

    A block is f16 d, the fifth bits of its 32 codes, and their low four as in Q4_0.
    """
    n = len(blocks)
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    made = np.empty((n, 34), np.uint8)
    made[:, :2] = blocks[:, :2]
    made[:, 2:] = (low | fifth << 4) - np.uint8(16)  # modulo 256: two's complement
    return made


def q4_1_of_q4_k(blocks: Bytes) -> Bytes:
    """[n, 144] -> [n, 8 x 20]: codes stay, scales and minima are rounded to f16.

    A block is f16 d and dmin, 12 bytes of 6-bit s and m for 8 groups of 32, and their codes: value
    = d s code - dmin m. Each 32 bytes of codes hold a group in their low nibbles and the next in
    their high ones.
    """
    n = len(blocks)
    d, dmin = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]  # [n, 1] each
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    made = np.empty((n, 8, 20), np.uint8)
    with np.errstate(over="ignore"):  # infinite scales are for who finds infinite logits to tell
        made[..., :2] = (d * scales).astype("<f2")[..., None].view(np.uint8)
        made[..., 2:4] = (-dmin * minima).astype("<f2")[..., None].view(np.uint8)
    pairs = blocks[:, 16:].reshape(n, 4, 1, 32)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(n, 8, 2, 16)
    made[..., 4:] = codes[:, :, 0] | codes[:, :, 1] << 4
    return made.reshape(n, -1)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[n, 12] -> s [n, 8] and m [n, 8].

    Bytes 0..3 and 4..7 hold s and m of the first four groups in their low six bits, and in their
    high two those of the other four, whose low four bits are the nibbles of bytes 8..11.
    """
    first_s, first_m, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = np.concatenate([first_s & 63, rest & 15 | first_s >> 6 << 4], axis=1)
    m = np.concatenate([first_m & 63, rest >> 4 | first_m >> 6 << 4], axis=1)
    return s, m


CONVERSIONS = {
    "Q5_0": Conversion("Q8_0", 22, q8_0_of_q5_0),
    "Q4_K": Conversion("Q4_1", 144, q4_1_of_q4_k),
}


def convert_blocks(raw: Bytes, conversion: Conversion) -> Bytes:
    """The bytes of whole blocks as bytes of the other format's."""
    blocks = raw.reshape(-1, conversion.block_bytes)
    pieces = [
        conversion.convert(blocks[start : start + PIECE_BLOCKS])
        for start in range(0, len(blocks), PIECE_BLOCKS)
    ]
    return np.concatenate(pieces).ravel()
