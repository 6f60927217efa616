"""Real text without a download: the docstrings of the Python packages that are installed anyway.

The docstring of a module, class or function is a document. A function's signature and its docstring are an example of
a prompt and a response. Files are parsed, never imported.
"""

import ast
import copy
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("composer", "networkx", "numpy", "streaming", "torch")
"""Packages that this package depends on and that are well documented. The standard library is read too."""

NOT_DOCUMENTATION = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"})
"""Names of folders that are passed over."""


def source_files() -> list[tuple[str, Path]]:
    """Python files to read as `(name, path)`, sorted by name. Names are the same on every machine."""
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
    """Docstrings of all files in order, each text once."""
    return (text for text, _ in documented(files))


def documented(files: Iterable[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Each docstring of all files in order, and the module, class or function that it documents.

    A text that comes again is left out, as are files that are not UTF-8.
    """
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


def docstrings(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Docstrings of a Python source text and what they document, outermost first. None if the text does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in packages of others
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text, node


def signature_of(node: ast.AST) -> str | None:
    """The line that begins a function, without decorators: `def name(arguments) -> type:`. None for other nodes."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    bare = copy.copy(node)
    bare.body, bare.decorator_list = [], []
    return ast.unparse(bare).strip()
