"""A folder without BOS gets a copy with it; one that begins texts alike is left as it is."""

from __future__ import annotations

from peers_folder import folder_that_begins_as

from kvloom.tokenizer import load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint
from tiny_folder import make_tiny_folder


class WithBos:
    """As a GGUF file's tokenizer: token 256 begins a text."""

    def encode(self, text, add_special_tokens):
        return [256]


def read(folder):
    return load_tokenizer(open_checkpoint(folder))


def test_a_copy_begins_texts_and_has_all_else(tmp_path):
    folder = make_tiny_folder(tmp_path / "folder")
    own = read(folder)
    plain = own.encode("ab", add_special_tokens=True)
    for _ in range(2):  # what an earlier run left is no obstacle
        copy = folder_that_begins_as(WithBos(), own, folder, tmp_path / "copy")
    assert copy == tmp_path / "copy"
    made = read(copy)
    assert made.encode("ab", add_special_tokens=True) == [256, *plain]
    assert made.encode("ab", add_special_tokens=False) == plain
    assert {file.name for file in copy.iterdir()} == {file.name for file in folder.iterdir()}
    assert (copy / "model.safetensors").samefile(folder / "model.safetensors")
    assert read(folder).encode("ab", add_special_tokens=True) == plain
    assert folder_that_begins_as(WithBos(), made, copy, tmp_path / "other") == copy
    assert not (tmp_path / "other").exists()
