"""Ids, texts and chat prompts that transformers gives for the same GGUF files (golden)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvloom.tokenizer import Tokenizer, load_tokenizer
from kvloom.tokenizer.chat import ChatOptions, ChatTemplate
from kvloom.tokenizer.from_gguf import tokenizer_from_gguf
from kvloom.weights.checkpoint import open_checkpoint
from kvloom.weights.gguf_header import read_header

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


def digest(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:8]


def check_against(golden: dict[str, Any], tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(string, add_special_tokens=True) for string in GOLDEN["strings"]]
    # The samples first: a difference in them shows the ids.
    assert ids[: len(golden["ids"])] == golden["ids"]
    differing = [
        string
        for string, own, expected in zip(GOLDEN["strings"], ids, golden["digests"], strict=True)
        if digest(own) != expected
    ]
    assert differing == []
    texts = [tokenizer.decode(one, False, False) for one in golden["ids"]]
    assert texts == golden["texts"]


def test_the_strings_are_a_thousand_different_ones() -> None:
    assert len(set(GOLDEN["strings"])) == 1000


def test_smollm2_ids_and_texts(smollm2_tokenizer: Tokenizer) -> None:
    check_against(GOLDEN["models"]["smollm2"], smollm2_tokenizer)


def test_gemma_ids_and_texts(models_dir: Path) -> None:
    path = models_dir / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not there; run scripts/fetch_models")
    tokenizer = tokenizer_from_gguf(read_header(path).metadata, frozenset())
    check_against(GOLDEN["models"]["gemma"], tokenizer)
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize("chat", GOLDEN["chats"])
def test_smollm2_chat_prompts(smollm2_tokenizer: Tokenizer, chat: dict[str, Any]) -> None:
    text = smollm2_tokenizer.render_chat(chat["messages"])
    assert text == chat["text"]
    assert smollm2_tokenizer.encode(text, add_special_tokens=False) == chat["ids"]


@pytest.mark.parametrize("case", GOLDEN["templates"])
def test_templates_render_as_in_transformers(case: dict[str, Any]) -> None:
    template = ChatTemplate(case["template"], {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(case["messages"], ChatOptions()) == case["text"]
