"""How texts end: vocabularies of byte strings, and cases with their right answers."""

from __future__ import annotations

REPLACEMENT = "\ufffd"


class ByteDecoder:
    """A vocabulary of byte strings; token ids are indices. None is a special token."""

    def __init__(self, pieces: list[bytes | None]) -> None:
        self.pieces = pieces
        self.longest_window = 0

    def decode(self, ids, skip_special_tokens, spaces_between_special_tokens):
        self.longest_window = max(self.longest_window, len(ids))
        special = b"" if skip_special_tokens else b"<s>"
        pieces = [self.pieces[i] for i in ids]
        data = b"".join(special if piece is None else piece for piece in pieces)
        return data.decode("utf-8", "replace")

    def plain_texts(self, skip_special_tokens):
        special = "" if skip_special_tokens else "<s>"
        return [special if piece is None else whole_text(piece) for piece in self.pieces]


def whole_text(piece: bytes) -> str | None:
    text = piece.decode("utf-8", "replace")
    return None if REPLACEMENT in text else text


def byte_pieces(texts) -> list[bytes | None]:
    pieces = {"E": None}
    return [pieces.get(t, t.encode() if isinstance(t, str) else bytes([t])) for t in texts]


# "E" is the end token, special and skipped; numbers are single bytes.
CASE_9 = [
    # pieces, stop, prompt, text, forbidden in any delta, tokens consumed
    (["ab", "c", "d", "ef"], "cde", "", "ab", "cde", 4),
    (["ab", "c", "d", "x", "E"], "cde", "", "abcdx", "", 5),
    (["ab", "c", "E"], "cde", "", "abc", "", 3),
    (["ab", "c"], "cde", "", "abc", "", 2),
    (["a", "a", "a", "b", "z"], "aab", "", "a", "b", 4),
    (["abcde", "f"], "cd", "", "ab", "ce", 1),
    (["d", "e", "E"], "cd", "c", "de", "", 3),
    ([0xF0, 0x9F, 0x98, 0x80, "E"], None, "", "\U0001f600", REPLACEMENT, 5),
    ([0xED, 0x95, 0x9C, "!", "E"], None, "", "\ud55c!", REPLACEMENT, 5),
    ([0xF0, 0x9F], None, "", REPLACEMENT, "", 2),
    ([0x80, "a", "E"], None, "", REPLACEMENT + "a", "", 3),
]
