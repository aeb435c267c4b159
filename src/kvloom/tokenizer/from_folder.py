"""Tokenizers of Hugging Face folders: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvloom.errors import ModelNotFoundError
from kvloom.tokenizer.post_processor import add_template
from kvloom.tokenizer.tokenizer import SpecialTokens, Tokenizer

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def tokenizer_from_folder(folder: Path, eos_token_ids: frozenset[int]) -> Tokenizer:
    """The tokenizer of a model folder; its own EOS is added to `eos_token_ids`.

    Raises:
        ModelNotFoundError: tokenizer.json is missing, or a file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json; convert the tokenizer with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any damage
        raise ModelNotFoundError(f"{path} cannot be read ({error}); fetch it again") from None
    # Saved with some tokenizers; prompts are cut and batched by the engine alone.
    backend.no_truncation()
    backend.no_padding()
    config = _read_object(folder / "tokenizer_config.json")
    texts = _special_texts(folder, config)
    bos = backend.token_to_id(texts.get("bos_token", ""))
    if "add_bos_token" in config or "add_eos_token" in config:
        add_template(
            backend,
            bos=texts.get("bos_token") if config.get("add_bos_token") else None,
            eos=texts.get("eos_token") if config.get("add_eos_token") else None,
        )
    eos = backend.token_to_id(texts.get("eos_token", ""))
    special = SpecialTokens(texts, bos, eos_token_ids if eos is None else eos_token_ids | {eos})
    return Tokenizer(backend, special, _chat_template(folder, config))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} is not valid JSON ({error}); fetch it again") from None
    return content if isinstance(content, dict) else {}


def _read_text(path: Path) -> str:
    return path.read_text("utf-8-sig")  # some editors put a byte order mark first


def _special_texts(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    named = _read_object(folder / "special_tokens_map.json") | dict(config)
    texts = {}
    for name in _SPECIAL_NAMES:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return _read_text(file)
        except ValueError as error:
            raise ModelNotFoundError(f"{file} is no text ({error}); fetch it again") from None
    named = _read_object(folder / "chat_template.json").get("chat_template")
    template = config.get("chat_template") if named is None else named
    if isinstance(template, list):  # [{"name": ..., "template": ...}, ...]
        return {entry["name"]: str(entry["template"]) for entry in template}.get("default")
    return template if isinstance(template, str) else None
