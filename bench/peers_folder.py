"""The bf16 model's folder, with a tokenizer that begins texts as the GGUF file's does.

A folder that was made of a GGUF file may have lost which tokens begin a text (BOS). Engines that
read the folder would then run other prompts than those that read the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

TOKENIZER = "tokenizer.json"


class BeginningTokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids."""


def folder_that_begins_as(
    tokenizer: BeginningTokenizer, own: BeginningTokenizer, folder: Path, copy: Path
) -> Path:
    """`folder`, whose tokenizer is `own`; or `copy`, if that begins texts unlike `tokenizer`.

    The copy is made anew: links to all files but the tokenizer's.
    """
    beginning = tokenizer.encode("", add_special_tokens=True)
    if own.encode("", add_special_tokens=True) == beginning:
        return folder
    copy.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        target = copy / file.name
        target.unlink(missing_ok=True)
        if file.name != TOKENIZER:
            target.symlink_to(file.resolve())
    content = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    content["post_processor"] = template(content["added_tokens"], beginning)
    (copy / TOKENIZER).write_text(json.dumps(content), encoding="utf-8")
    return copy


def template(added_tokens: list[dict[str, Any]], beginning: list[int]) -> dict[str, Any]:
    """The part of a tokenizer.json that puts the tokens `beginning` before a text."""
    names = {token["id"]: token["content"] for token in added_tokens}
    special = [{"SpecialToken": {"id": names[one], "type_id": 0}} for one in beginning]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*special, first],
        "pair": [*special, first, second],
        "special_tokens": {
            names[one]: {"id": names[one], "ids": [one], "tokens": [names[one]]}
            for one in beginning
        },
    }
