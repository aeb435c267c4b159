"""Which native module is chosen, and what is said when none can be."""

from __future__ import annotations

import logging

import pytest

from kvloom.errors import ConfigError
from kvloom.ops import isa


@pytest.fixture
def old_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that runs AVX2 and no AVX512."""
    monkeypatch.setattr(isa, "can_run", lambda name: name in {"avx2", "generic"})


def test_the_best_that_the_machine_runs_is_chosen(old_machine: None):
    assert isa.choose_isa(isa.ISAS, None) == "avx2"
    assert isa.choose_isa(("avx512", "generic"), None) == "generic"


def test_one_can_be_forced(old_machine: None):
    assert isa.choose_isa(isa.ISAS, "generic") == "generic"


@pytest.mark.parametrize(
    ("forced", "reason"),
    [
        ("avx512", "not supported by this machine"),
        ("sse9", "not known"),
        ("", "not known"),
        ("avx512bf16", "not built"),
    ],
)
def test_one_that_cannot_be_used_is_refused(old_machine: None, forced: str, reason: str):
    with pytest.raises(ConfigError, match=rf"{reason}.*\['avx2', 'generic'\]"):
        isa.choose_isa(("avx512", "avx2", "generic"), forced)


def test_an_installation_without_modules_says_what_to_do():
    with pytest.raises(ConfigError, match=r"C\+\+17 compiler.*reference"):
        isa.choose_isa((), None)


def test_the_probe_knows_no_other_names():
    assert isa.can_run("generic")
    assert not isa.can_run("sse9")


@pytest.mark.parametrize("name", isa.built_isas())
def test_each_module_can_be_forced(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if not isa.can_run(name):
        pytest.skip("this machine does not run it")
    monkeypatch.setenv("KVLOOM_ISA", name)
    with caplog.at_level(logging.INFO):
        assert isa.load_native().isa == name
    assert name in caplog.text


def test_all_modules_were_built():
    """What CI tests is what is shipped: a build that left some out would test nothing of them."""
    assert isa.built_isas() in {isa.ISAS, ("generic",)}
