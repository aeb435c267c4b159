"""From a model's files to its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvloom.tokenizer.from_folder import tokenizer_from_folder
from kvloom.tokenizer.from_gguf import tokenizer_from_gguf
from kvloom.tokenizer.tokenizer import Tokenizer


class ModelFiles(Protocol):
    """What is asked of a `kvloom.weights.checkpoint.Checkpoint`."""

    @property
    def path(self) -> Path:
        """The model's folder, or its GGUF file."""

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """The GGUF file's key/value pairs; None for a folder."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.json."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that the files say end a sequence."""


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer that belongs to a checkpoint.

    Ids that end a sequence are left out where the model has no logits for them: it never samples
    them, and what adjusts logits could not.

    Raises:
        ModelNotFoundError: the folder has no tokenizer.
        UnsupportedModelError: a kind of tokenizer that is not known.
    """
    if files.metadata is None:
        tokenizer = tokenizer_from_folder(files.path, files.eos_token_ids)
    else:
        tokenizer = tokenizer_from_gguf(files.metadata, files.eos_token_ids)
    vocab_size = files.config.get("vocab_size")
    if isinstance(vocab_size, int):  # else the model is refused when it is built
        within = range(vocab_size)
        tokenizer.eos_token_ids = frozenset(i for i in tokenizer.eos_token_ids if i in within)
    return tokenizer
