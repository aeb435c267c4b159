"""Size limits of the sources, and the environment variables they may read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_ENV_VARS = 5
# Read for a standard's sake: where each user keeps caches is not ours to name.
STANDARD_ENV_VARS = {"XDG_CACHE_HOME"}


def is_python(path: Path) -> bool:
    if not path.is_file():
        return False
    return path.suffix == ".py" or (not path.suffix and "python" in first_line(path))


def first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline()


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*") if is_python(p))


def cpp_sources() -> list[Path]:
    return sorted(p for p in (ROOT / "csrc").rglob("*.?pp"))


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name: "environ" for both os.environ and environ."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def owner_of(node: ast.AST) -> ast.AST:
    """What an attribute is taken from: `os.environ` of `os.environ.get`."""
    return node.value if isinstance(node, ast.Attribute) else node


def env_vars_of(tree: ast.AST) -> Iterator[str]:
    """Names read from the environment; "?" stands for one that is not a literal."""
    for node in ast.walk(tree):
        keys: list[ast.AST] = []
        if isinstance(node, ast.Subscript) and name_of(node.value) == "environ":
            keys = [node.slice]
        elif isinstance(node, ast.Compare) and "environ" in map(name_of, node.comparators):
            keys = [node.left]
        elif isinstance(node, ast.Call) and name_of(node.func) == "getenv":
            keys = [node.args[0]]
        elif isinstance(node, ast.Call) and name_of(owner_of(node.func)) == "environ":
            keys = [node.args[0]] if node.args else [node]
        for key in keys:
            yield str(key.value) if isinstance(key, ast.Constant) else "?"


def test_there_are_sources_to_measure():
    assert len(sources("src")) > 10
    assert len(sources("src", "scripts", "bench")) > len(sources("src"))


@pytest.mark.parametrize("path", sources("src", "scripts", "bench"), ids=lambda p: p.name)
def test_files_and_functions_are_short(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, f"{path} is too long; split it by what it decides"
    for function in functions_of(ast.parse(text)):
        num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
        where = f"{path}:{function.lineno} {function.name}"
        assert num_lines <= MAX_FUNCTION_LINES, f"{where} has {num_lines} lines"


def cpp_functions_of(text: str) -> Iterator[tuple[str, int]]:
    """First lines and numbers of lines of all functions, as clang-format leaves them.

    A line that has nothing but a brace, at most two spaces in (in a class), ends what the last line
    before it that is exactly as far in has started: a function, or a shorter block within one.
    """
    lines = text.splitlines()
    for end, line in enumerate(lines):
        if line in {"}", "  }"}:
            starts = re.compile(rf"{line[:-1]}[^ }}#/]")
            start = max((i for i in range(end) if starts.match(lines[i])), default=end)
            yield lines[start].strip(), end - start + 1


@pytest.mark.parametrize("path", cpp_sources(), ids=lambda p: p.name)
def test_cpp_files_and_functions_are_short(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, f"{path} is too long; split it by what it decides"
    for name, num_lines in cpp_functions_of(text):
        assert num_lines <= MAX_FUNCTION_LINES, f"{path}: {name} has {num_lines} lines"


def test_environment_variables_are_few_and_in_the_readme():
    names = {n for p in sources("src") for n in env_vars_of(ast.parse(p.read_text()))}
    readme = (ROOT / "README.md").read_text()
    assert "?" not in names, "an environment variable's name must be a literal"
    assert len(names - STANDARD_ENV_VARS) <= MAX_ENV_VARS, sorted(names)
    assert not {n for n in names if f"`{n}`" not in readme}


def test_cpp_functions_are_measured():
    text = """
namespace kvloom {
struct Args {
  int size() const {
    return 1;
  }
};
void run(const Args& args,
         int item) {
  if (item) {
  }

}
}  // namespace kvloom
"""
    functions = dict(cpp_functions_of(text))
    assert functions["int size() const {"] == 3
    assert functions["void run(const Args& args,"] == 6


def test_env_vars_are_found_however_they_are_read():
    text = """
a = os.environ["A"], os.environ.get("B", "x"), os.getenv("C"), "D" in os.environ
b = environ["E"], environ.get("F"), getenv("G"), os.environ.get(name), settings["H"]
"""
    assert set(env_vars_of(ast.parse(text))) == {"A", "B", "C", "D", "E", "F", "G", "?"}
