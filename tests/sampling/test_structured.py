"""Masks of grammars are what their definitions say; grammars that cannot work are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvloom.errors import RequestError
from kvloom.sampling.grammar_checker import GrammarChecker
from kvloom.sampling.structured import GrammarStates
from kvloom.sampling.vocabulary import make_vocabulary
from kvloom.step import CachedRequestData, SchedulerOutput
from kvloom.structured_outputs import StructuredOutputs
from kvloom.tokenizer import Tokenizer, load_tokenizer
from kvloom.tokenizer.from_folder import tokenizer_from_folder
from kvloom.weights.checkpoint import open_checkpoint
from tiny_folder import make_tiny_folder

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text("utf-8"))
EOS = 257


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token per byte."""
    folder = make_tiny_folder(tmp_path_factory.mktemp("tiny"))
    return tokenizer_from_folder(folder, frozenset({EOS}))


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


def step_of(rows: dict[str, int], drafts: dict[str, list[int]]) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens=dict.fromkeys(rows, 1),
        total_num_scheduled_tokens=len(rows),
        scheduled_spec_decode_tokens=drafts,
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        structured_output_request_ids=rows,
        grammar_bitmask=None,
        kv_connector_metadata=None,
        block_copies=[],
    )


class Text:
    """The text of a request "a" as it goes through its grammar."""

    def __init__(self, grammars: GrammarStates, structured: StructuredOutputs):
        if "a" in grammars._requests:
            grammars.end("a")
        self.grammars = grammars
        self.vocab_size = grammars._vocab_size
        self.grammars.begin("a", structured)
        self.grammars.wait(60)
        assert self.grammars.take_compiled() == [("a", None)]

    def allowed(self, drafts: Sequence[int] = ()) -> list[set[int]]:
        mask = self.grammars.token_mask(step_of({"a": 0}, {"a": list(drafts)}))
        assert mask is not None
        bits = np.unpackbits(mask.bits.view(np.uint8), axis=1, bitorder="little")
        return [set(np.flatnonzero(row[: self.vocab_size]).tolist()) for row in bits]

    def add(self, token_id: int) -> bool:
        progress = self.grammars.accept("a", token_id)
        assert progress.error is None
        return progress.is_complete


CHOICES = ("left", "lever", "le", "right!", "é")


def test_choices_allow_the_bytes_that_lead_to_one(bytewise: Tokenizer):
    """By definition: b may follow t if t + b begins a choice, EOS if t is one."""
    grammars = GrammarStates(bytewise, vocab_size=300)
    whole = {choice.encode() for choice in CHOICES}
    begun = {text[:n] for text in whole for n in range(len(text) + 1)}
    id_of = {bytewise.token_bytes(i): i for i in range(256)}
    for text in sorted(begun):
        one = Text(grammars, StructuredOutputs(choice=CHOICES))
        is_complete = [one.add(id_of[bytes([byte])]) for byte in text][-1:]
        follows = {id_of[byte] for byte in id_of if text + byte in begun}
        expected = follows | ({EOS} if text in whole else set())
        assert one.allowed() == [expected]
        assert is_complete in ([], [not follows])


def test_tokens_of_many_bytes_lead_to_a_choice(smollm2_tokenizer: Tokenizer):
    """Every allowed token continues to a choice, and any walk ends at one; EOS is id 2."""
    rng, reached = random.Random(0), set()
    texts = ("the quick fox", "the quiet fog", "a\n<|im_end|>", "ünïcode 😀", "a")
    grammars = GrammarStates(smollm2_tokenizer, vocab_size=49152)
    table = [smollm2_tokenizer.token_bytes(i) for i in range(49152)]
    for _ in range(40):
        one = Text(grammars, StructuredOutputs(choice=texts))
        text = b""
        while True:
            [allowed] = one.allowed()
            assert (2 in allowed) == (text.decode(errors="replace") in texts)
            for token_id in allowed - {2}:
                assert table[token_id]
                assert any(t.encode().startswith(text + table[token_id]) for t in texts)
            token_id = rng.choice(sorted(allowed))
            if token_id == 2:
                break
            text += table[token_id]
            if one.add(token_id):
                break
        reached.add(text.decode())
    assert reached == set(texts)
    grammars.shutdown()


def test_rows_behind_drafts_are_those_behind_known_tokens(bytewise: Tokenizer):
    structured = StructuredOutputs(json={"enum": ["abc", "abd", 12]})
    drafts = [bytewise.encode(c, False)[0] for c in '"abx"']
    grammars, behind = GrammarStates(bytewise, vocab_size=258), []
    for num_known in range(4):
        one = Text(grammars, structured)
        for token_id in drafts[:num_known]:
            one.add(token_id)
        behind += one.allowed()
    one = Text(grammars, structured)
    assert one.grammars.num_fitting("a", drafts) == 3
    for _ in range(2):  # the drafts leave nothing behind
        assert one.allowed(drafts)[:4] == behind
        assert len(one.allowed(drafts)) == 6


def test_requests_of_one_grammar_go_their_own_ways(bytewise: Tokenizer):
    grammars = GrammarStates(bytewise, 258)
    structured = StructuredOutputs(choice=("ab", "cd"))
    a, c = (bytewise.encode(letter, False)[0] for letter in "ac")
    for req_id in ("one", "other"):
        grammars.begin(req_id, structured)
    assert len(grammars._compiled) == 1
    grammars.wait(60)
    assert grammars.take_compiled() == [("one", None), ("other", None)]
    grammars.accept("one", a)
    grammars.accept("other", c)
    mask = grammars.token_mask(step_of({"other": 0, "one": 1, "gone": 2}, {}))
    assert mask is not None
    words = [np.flatnonzero(np.unpackbits(r.view(np.uint8), bitorder="little")) for r in mask.bits]
    assert [row.tolist() for row in words[:2]] == [[c + 1], [a + 1]]
    assert grammars.token_mask(step_of({}, {})) is None
    assert grammars.accept("one", c).error is not None  # which its mask did not allow
    grammars.shutdown()


def check_bytes(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Not those of the string that was encoded: some tokenizers know no token for some bytes."""
    assert b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.decode(ids, False, False).encode()


def test_token_bytes_are_those_of_the_texts(smollm2_tokenizer: Tokenizer, bytewise: Tokenizer):
    for tokenizer in (smollm2_tokenizer, bytewise):
        for string in GOLDEN["strings"]:
            ids = tokenizer.encode(string, add_special_tokens=False)
            check_bytes(tokenizer, ids)


@pytest.mark.full
def test_gemma_token_bytes(models_dir: Path):
    path = models_dir / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not there; run scripts/fetch_models")
    tokenizer = load_tokenizer(open_checkpoint(path))
    for string in GOLDEN["strings"][:300]:
        ids = tokenizer.encode(string, add_special_tokens=False)
        check_bytes(tokenizer, ids)


class SpaceFirst:
    """A tokenizer that puts a space before every text, as some do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_ids = tokenizer.eos_token_ids
        self.special_token_ids = tokenizer.special_token_ids
        self.token_bytes = tokenizer.token_bytes

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(" " + text, add_special_tokens)


@pytest.mark.parametrize("text", ["a name", "<|im_end|>", "é"])
def test_a_forced_text_is_written_in_its_own_bytes(smollm2_tokenizer: Tokenizer, text: str):
    """Neither a space that the tokenizer adds nor a special token that it sees may get in."""
    for tokenizer in (smollm2_tokenizer, SpaceFirst(smollm2_tokenizer)):
        vocabulary = make_vocabulary(tokenizer, 49152)
        ids = vocabulary.tokenize_str(text)
        assert b"".join(map(smollm2_tokenizer.token_bytes, ids)) == text.encode()
        assert smollm2_tokenizer.special_token_ids.isdisjoint(ids)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"json": {"type": "objec"}}, "Invalid type: objec"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "null"}}}, "not"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"json": {"$ref": "#"}}, "no text matches it"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": nested(5000)}, "recursion|depth|nest"),
        ({"json": {"enum": list(range(30_000))}}, "too (big|large)"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 5000 + ")" * 5000}, "nest"),
        ({"regex": "a" * 200_001}, "200001 characters"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"grammar": "start: start"}, "no text matches it"),
        ({"grammar": 'start: "a" <|im_start|>'}, "special"),
        ({"grammar": 'start: "a" <[0-100]>'}, "special"),
        ({"grammar": "start: word\nword[temperature=0.5]: /[a-z]+/"}, "temperature"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(checker: GrammarChecker, given: dict, reason: str):
    for _ in range(2):  # also when it is remembered
        with pytest.raises(RequestError, match=reason) as error:
            checker.check(StructuredOutputs(**given))
        assert error.value.field == f"structured_outputs.{next(iter(given))}"


def test_what_is_taken(checker: GrammarChecker):
    for given in (
        {"json_object": True},
        {"json": {}},
        {"json": {"unknown keyword": 1}},  # JSON Schema says that these say nothing
        {"choice": ['"', "\\", "\x00", "\u2028", "<|im_end|>"]},
        {"grammar": 'start: "temperature=" /[0-9]+/'},
        {"regex": "a{0,60000}"},
    ):
        checker.check(StructuredOutputs(**given))


EXPLOSIVE = StructuredOutputs(grammar="start: A\nA: /.*a.{30}/ & /.*b.{29}/ & ~/.*c.{25}/")


def test_a_grammar_that_would_take_forever_is_refused_and_harms_no_other():
    checker = GrammarChecker(max_cpu_seconds=0.5)
    for _ in range(2):
        with pytest.raises(RequestError, match="takes more than"):
            checker.check(EXPLOSIVE)
        checker.check(StructuredOutputs(regex="a"))
    checker.close()
    checker.check(StructuredOutputs(regex="ab"))  # in a new process
    checker.close()
