"""How byte-level tokenizers write bytes: one printable character for each."""

from __future__ import annotations


def byte_alphabet() -> list[str]:
    """The character for each byte: itself where it is printable, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(byte_alphabet())}
