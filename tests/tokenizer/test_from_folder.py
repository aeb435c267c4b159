"""Tokenizers of Hugging Face folders, from small files made here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvloom.errors import ModelNotFoundError, UnsupportedModelError
from kvloom.tokenizer import Tokenizer, load_tokenizer

BOS, EOS = 256, 257


@dataclass
class Files:
    path: Path
    metadata: dict[str, Any] | None = None
    eos_token_ids: frozenset[int] = frozenset()
    config: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One token per byte, <s> and </s>; encoding places <s>; cut to four tokens and padded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(folder: Path, eos: set[int] = frozenset(), **config: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(Files(folder, eos_token_ids=frozenset(eos)))


def test_the_files_own_rules(folder: Path) -> None:
    tokenizer = load_tokenizer(Files(folder))
    assert tokenizer.encode("", add_special_tokens=True) == [BOS]
    assert tokenizer.encode("", add_special_tokens=False) == []
    ids = tokenizer.encode("longer than four", add_special_tokens=True)
    assert len(ids) == 17
    assert tokenizer.decode(ids) == "longer than four"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, frozenset())


def test_special_tokens_of_the_config(folder: Path) -> None:
    named = load(folder, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    assert (named.bos_token_id, named.eos_token_ids) == (BOS, {EOS})


def test_several_eos_ids(folder: Path) -> None:
    assert load(folder, {7, 8}, eos_token="</s>").eos_token_ids == {7, 8, EOS}
    assert load(folder, {7, 8}).eos_token_ids == {7, 8}


def test_the_special_tokens_map(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "x"}')
    tokenizer = load(folder, eos_token="</s>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, {EOS})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"add_bos_token": False}, [97]),
        ({"add_bos_token": True}, [BOS, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS, 97, EOS]),
        ({"add_eos_token": True}, [97, EOS]),
    ],
)
def test_flags_of_the_config_win(folder: Path, flags: dict[str, bool], expected: list[int]) -> None:
    tokenizer = load(folder, bos_token="<s>", eos_token="</s>", **flags)
    ids = tokenizer.encode("a", add_special_tokens=True)
    # The byte alphabet is sorted by character, which puts "a" elsewhere than 97.
    [a] = tokenizer.encode("a", add_special_tokens=False)
    assert ids == [a if one == 97 else one for one in expected]


def template_of(folder: Path, **config: Any) -> str | None:
    tokenizer = load(folder, **config)
    if not tokenizer.has_chat_template:
        return None
    return tokenizer.render_chat([{"role": "user", "content": ""}])


def test_where_chat_templates_are_found(folder: Path) -> None:
    assert template_of(folder) is None
    assert template_of(folder, chat_template="config") == "config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "named"}]
    assert template_of(folder, chat_template=named) == "named"
    assert template_of(folder, chat_template=named[:1]) is None
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert template_of(folder, chat_template="config") == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert template_of(folder, chat_template="config") == "jinja"


def test_a_byte_order_mark_is_no_part_of_a_file(folder: Path) -> None:
    files = {"special_tokens_map.json": '{"eos_token": "</s>"}', "chat_template.jinja": "jinja"}
    for name, text in {**files, "tokenizer_config.json": '{"bos_token": "<s>"}'}.items():
        (folder / name).write_text("\ufeff" + text, "utf-8")
    tokenizer = load_tokenizer(Files(folder))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, {EOS})
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "jinja"


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"]
)
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"{", b"NaN and more"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=rf"{name} is not valid JSON .*; fetch it again"):
        load_tokenizer(Files(folder))


def test_a_damaged_template_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelNotFoundError, match=r"chat_template\.jinja is no text"):
        load_tokenizer(Files(folder))


def test_folders_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(Files(folder))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(Files(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json"):
        load_tokenizer(Files(folder))


@pytest.mark.parametrize(("vocab_size", "kept"), [(257, {0, 256}), (258, {0, 256, 257})])
def test_ends_without_logits_are_left_out(folder: Path, vocab_size: int, kept: set[int]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    ends = frozenset({-1, 0, 256, 258})
    files = Files(folder, eos_token_ids=ends, config={"vocab_size": vocab_size})
    assert load_tokenizer(files).eos_token_ids == kept


@pytest.mark.parametrize("kind", ["bos", "eos"])
def test_a_placed_token_must_be_in_the_vocabulary(folder: Path, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="'<none>', which is not in its vocabulary"):
        load(folder, **{f"{kind}_token": "<none>", f"add_{kind}_token": True})
