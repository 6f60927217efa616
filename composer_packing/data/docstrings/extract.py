"""Real text without a download: the documentation inside the Python packages that are installed anyway.

Every docstring of a module, class or function is a document; a function's signature and its docstring are an example
of a prompt and a response. Files are parsed, never imported.
"""

import ast
import copy
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("composer", "networkx", "numpy", "streaming", "torch")
"""Packages that this one depends on and that are well documented. The standard library is read too."""

NOT_DOCUMENTATION = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"})
"""Folders that are passed over wherever they lie."""


def source_files() -> list[tuple[str, Path]]:
    """Python files to read: `(name, path)`, sorted by name, which is the same on every machine."""
    standard_library = Path(sysconfig.get_path("stdlib"))
    installed = Path(sysconfig.get_path("purelib"))
    folders = [("stdlib", standard_library)] + [(package, installed / package) for package in PACKAGES]
    return sorted(
        (f"{name}/{path.relative_to(folder).as_posix()}", path)
        for name, folder in folders
        for path in folder.rglob("*.py")
        if NOT_DOCUMENTATION.isdisjoint(path.relative_to(folder).parts)
    )


def documents(files: Iterable[Path]) -> Iterator[str]:
    """Docstrings of all files in order, each text once; files that are not UTF-8 are passed over."""
    return (text for text, _ in _documented(files))


def examples(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """`(signature, docstring)` of the functions whose docstring is one of `documents` and first found there."""
    for text, node in _documented(files):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield signature(node), text


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The line that begins a function, without decorators: `def name(arguments) -> type:`."""
    bare = copy.copy(node)
    bare.body, bare.decorator_list = [], []
    return ast.unparse(bare).strip()


def docstrings(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Docstrings of a Python source text and what they document, outermost first; none where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # others' invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text, node


def _documented(files: Iterable[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Each docstring of all files the first time it is found, and what it documents."""
    seen = set()
    for path in files:
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for text, node in docstrings(source):
            if text not in seen:
                seen.add(text)
                yield text, node
