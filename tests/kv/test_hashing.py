from __future__ import annotations

import subprocess
import sys
from hashlib import sha256

import pytest

from kvloom.kv.hashing import AdapterKey, ImageKey, extend_block_hashes, root_hash

BLOCK_SIZE = 4
PROMPT = list(range(100, 113))  # P of case 6: 13 ids
FRESH = list(range(200, 213))  # P of its image rows
RED, BLUE = b"red picture", b"blue picture"


def block_hashes(token_ids, salt=None, adapter=None, images=(), block_size=BLOCK_SIZE):
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, root_hash(salt, adapter), images)
    return hashes


class KeyCache:
    """A cache made of keys alone: cached tokens by the definition of a prefix hit."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def cached_tokens(self, token_ids, **extras) -> int:
        hashes = block_hashes(token_ids, **extras)
        usable = hashes[: (len(token_ids) - 1) // BLOCK_SIZE]
        num_hits = 0
        while num_hits < len(usable) and usable[num_hits] in self._seen:
            num_hits += 1
        self._seen.update(hashes)
        return num_hits * BLOCK_SIZE


def test_case_6_isolation_matrix():
    first, reloaded, renumbered = (
        AdapterKey("s1", 1, 1),
        AdapterKey("s1", 1, 2),
        AdapterKey("s1", 2, 1),
    )
    red, blue = ImageKey(RED, 5, 4), ImageKey(BLUE, 5, 4)
    rows = [
        (1, PROMPT, {}, 0),
        (2, PROMPT, {}, 12),
        (3, PROMPT, {"salt": "s1"}, 0),
        (4, PROMPT, {"salt": "s1"}, 12),
        (5, PROMPT, {"salt": "s2"}, 0),
        (6, PROMPT, {"adapter": first}, 0),
        (7, PROMPT, {"adapter": first}, 12),
        (8, PROMPT, {"salt": "ab", "adapter": AdapterKey("c", 3, 1)}, 0),
        (9, PROMPT, {"salt": "a", "adapter": AdapterKey("bc", 3, 1)}, 0),
        (10, PROMPT, {"adapter": reloaded}, 0),
        (11, PROMPT, {"adapter": renumbered}, 0),
        (13, FRESH, {"images": [red]}, 0),
        (14, FRESH, {"images": [red]}, 12),
        (15, FRESH, {"images": [blue]}, 4),
        (16, PROMPT, {"salt": "s1"}, 12),
    ]
    cache = KeyCache()
    assert [(row, cache.cached_tokens(ids, **extras)) for row, ids, extras, _ in rows] == [
        (row, expected) for row, _, _, expected in rows
    ]


def test_hashes_follow_the_documented_bytes():
    def field(tag: bytes, payload: bytes) -> bytes:
        return tag + len(payload).to_bytes(8, "little") + payload

    def ids(*token_ids: int) -> bytes:
        return b"".join(t.to_bytes(8, "little") for t in token_ids)

    def picture(offset: int) -> bytes:
        return field(b"M", RED) + field(b"O", offset.to_bytes(8, "little", signed=True))

    root = sha256(field(b"D", b"kvloom.block.1") + field(b"S", "é".encode())).digest()
    # The image takes positions 1 to 3: it begins at 1 of block 0, one before block 1.
    first = sha256(field(b"P", root) + field(b"T", ids(1, 2)) + picture(1)).digest()
    second = sha256(field(b"P", first) + field(b"T", ids(3, 4)) + picture(-1)).digest()
    third = sha256(field(b"P", second) + field(b"T", ids(5, 6))).digest()
    image = ImageKey(RED, 1, 3)
    hashes = block_hashes([1, 2, 3, 4, 5, 6, 7], salt="é", images=[image], block_size=2)
    assert hashes == [first, second, third]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([65] * 4, [321] * 4),  # equal in the lowest eight bits
        ([1] * 4, [1 + 2**16] * 4),
        ([1] * 4, [1 + 2**32] * 4),
        ([1, 2, 3, 4], [1, 2, 4, 3]),
    ],
)
def test_token_ids_keep_their_full_width_and_order(one, other):
    assert block_hashes(one) != block_hashes(other)


def test_equal_blocks_of_different_parents_differ():
    same = [7, 7, 7, 7]
    assert block_hashes([1] * 4 + same)[1] != block_hashes([2] * 4 + same)[1]
    assert block_hashes(same + same)[0] != block_hashes(same + same)[1]


def test_only_full_blocks_are_hashed_and_each_once():
    hashes: list[bytes] = []
    root = root_hash()
    for num_tokens in range(14):
        before = list(hashes)
        extend_block_hashes(hashes, PROMPT[:num_tokens], BLOCK_SIZE, root)
        assert len(hashes) == num_tokens // BLOCK_SIZE
        assert hashes[: len(before)] == before
    assert hashes == block_hashes(PROMPT)
    # What is there is taken as it is, never computed again.
    known = [b"a known hash"]
    extend_block_hashes(known, PROMPT, BLOCK_SIZE, root)
    assert known[0] == b"a known hash"
    assert len(known) == 3
    assert known[1] != hashes[1]


@pytest.mark.parametrize("start", range(3, 10))
@pytest.mark.parametrize("num_tokens", [1, 4, 5])
def test_an_image_counts_in_the_blocks_it_touches(start, num_tokens):
    plain = block_hashes(PROMPT)
    pictured = block_hashes(PROMPT, images=[ImageKey(RED, start, num_tokens)])
    first_touched = start // BLOCK_SIZE
    assert pictured[:first_touched] == plain[:first_touched]
    assert all(a != b for a, b in zip(plain[first_touched:], pictured[first_touched:], strict=True))


def test_the_same_image_elsewhere_is_another_key():
    same = [9] * 12  # placeholders do not tell where the image is
    assert block_hashes(same, images=[ImageKey(RED, 4, 2)]) != block_hashes(
        same, images=[ImageKey(RED, 5, 2)]
    )


def test_hashes_are_the_same_in_every_process():
    code = (
        "from kvloom.kv.hashing import *\n"
        "h = []\n"
        "root = root_hash('s', AdapterKey('a', 1, 2))\n"
        "extend_block_hashes(h, list(range(8)), 4, root, [ImageKey(b'i', 1, 9)])\n"
        "print([x.hex() for x in h])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here: list[bytes] = []
    root = root_hash("s", AdapterKey("a", 1, 2))
    extend_block_hashes(here, list(range(8)), 4, root, [ImageKey(b"i", 1, 9)])
    assert outputs == {f"{[x.hex() for x in here]}\n"}
