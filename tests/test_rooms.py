"""The shape of the package itself: which room imports which, and what each may import from elsewhere."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import composer_packing

PACKAGE = Path(composer_packing.__file__).parent

# Each room imports only from itself and from the rooms before it.
ORDER = ["common", "batch", "packing", "model", "config", "data", "checkpointing", "training"]

MAY_IMPORT = {
    "common": {"numba", "filelock"},
    "batch": {"torch"},
    "packing": {"numpy", "torch"},
    "model": {"torch"},
    "config": {"omegaconf", "yaml"},
    "data": {
        *("datasets", "numba", "numpy", "pyarrow", "streaming", "tokenizers", "torch", "tqdm", "transformers"),
    },
    "checkpointing": {"composer", "filelock", "numpy", "torch"},
    "training": {"composer", "numpy", "torch", "torchmetrics"},
}
"""Third-party packages of each room. Composer may be imported late for `composer.Time` in `common.durations`."""

WITHOUT_TORCH = {
    *(
        "packing.best_fit",
        "packing.subset_sum",
        "packing.blocks",
        "packing.document_table",
        "packing.ingest",
        "packing.layout",
    ),
    *("packing.options", "packing.schedules", "packing.source_batch", "packing.token_account", "packing.token_arrays"),
    *("packing.labels.keyed_mlm", "packing.labels.next_tokens", "packing.labels.published_mlm"),
    "model.config",
}
"""Modules of rooms with PyTorch that do without it."""

LATE = {("common.durations", "composer"), ("data.chat_examples", "transformers"), ("model.attention", "flash_attn")}
"""Packages that a room may import only inside a function, or for types."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, those that its functions import among them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_the_rooms_are_those_of_the_folder_listing() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ORDER)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "prepare.py"}


@pytest.mark.parametrize("module", [module for module in MODULES if module != "prepare"])
def test_imports_between_rooms_point_one_way(module: str) -> None:
    ours = {name.removeprefix("composer_packing.") for name in imports(MODULES[module]) if "composer_packing" in name}
    assert {room_of(name) for name in ours} <= set(ORDER[: ORDER.index(room_of(module)) + 1])


@pytest.mark.parametrize("module", [module for module in MODULES if module != "prepare"])
def test_a_room_imports_only_its_third_party_packages(module: str) -> None:
    others = {room_of(name) for name in imports(MODULES[module])} - sys.stdlib_module_names - {"composer_packing"}
    late = {package for name, package in LATE if name == module}
    assert others - late <= MAY_IMPORT[room_of(module)] - ({"torch"} if module in WITHOUT_TORCH else set())


def test_no_module_imports_itself_by_way_of_others() -> None:
    """The rooms' order says nothing of modules within a room."""
    arrows = {
        name: {one.removeprefix("composer_packing.") for one in imports(path) if one.startswith("composer_packing.")}
        for name, path in MODULES.items()
    }
    while arrows:
        leaves = {name for name, targets in arrows.items() if not targets & set(arrows)}
        assert leaves, f"these import each other in a circle: {sorted(arrows)}"
        arrows = {name: targets for name, targets in arrows.items() if name not in leaves}


@pytest.mark.parametrize("room", ORDER)
def test_every_room_says_what_it_is_for(room: str) -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert docstring is not None
    assert 5 <= len(docstring.splitlines()) <= 12
    files = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert {name for name in files if f"`{name}`" not in docstring} == set()


def test_the_core_is_imported_without_composer() -> None:
    code = "import sys, composer_packing; print('composer' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_public_names_are_sorted_and_there() -> None:
    assert composer_packing.__all__ == sorted(composer_packing.__all__)
    assert all(hasattr(composer_packing, name) for name in composer_packing.__all__)


def test_train_py_is_one_screen() -> None:
    assert len((PACKAGE.parent / "train.py").read_text().splitlines()) <= 60
