"""Block hashes: equal exactly when two full blocks hold the KV of equal prefixes.

```
root = H(salt, adapter)    hash 0 = H(root, tokens and images of block 0)    hash 1 = H(hash 0, ...)
```
Every hash covers its parent's, so it stands for the whole prefix. Every field is written as a tag,
a length and its bytes: a salt cannot pass for an adapter, nor ("ab", "c") for ("a", "bc"). A token
id takes eight bytes. SHA-256 and a fixed byte order make hashes the same in every process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

_DOMAIN = b"kvloom.block.1"


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """What tells one set of adapter weights from another.

    `generation` counts how often weights were loaded under this name and id.
    """

    name: str
    adapter_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class ImageKey:
    """An image in a prompt: the digest of its content, and the positions its tokens take."""

    digest: bytes
    start: int
    num_tokens: int


def root_hash(salt: str | None = None, adapter: AdapterKey | None = None) -> bytes:
    """The parent of a request's first block: whom its blocks may be shared with."""
    data = _field(b"D", _DOMAIN)
    if salt is not None:
        data += _field(b"S", salt.encode())
    if adapter is not None:
        data += _field(b"A", adapter.name.encode())
        data += _field(b"I", struct.pack("<qq", adapter.adapter_id, adapter.generation))
    return sha256(data).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    root: bytes,
    images: Sequence[ImageKey] = (),
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = _hash_block(parent, token_ids[start : start + block_size], start, images)
        hashes.append(parent)


def _hash_block(
    parent: bytes, token_ids: Sequence[int], start: int, images: Sequence[ImageKey]
) -> bytes:
    num_tokens = len(token_ids)
    data = _field(b"P", parent) + _field(b"T", struct.pack(f"<{num_tokens}q", *token_ids))
    for image in images:
        if image.start < start + num_tokens and start < image.start + image.num_tokens:
            # Where the image begins, seen from this block: which part of it the block holds.
            data += _field(b"M", image.digest) + _field(
                b"O", struct.pack("<q", image.start - start)
            )
    return sha256(data).digest()


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload
