"""The shape of the package itself: who imports whom, and how long files are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import composer_packing

PACKAGE = Path(composer_packing.__file__).parent

# Each module may import those above it only.
ORDER = [
    "checks",
    "compiling",
    "documents",
    "packing",
    "subset_sum",
    "masking",
    "keyed_masking",
    "next_tokens",
    "times",
    "policies",
    "schedules",
    "batch",
    "source_batch",
    "state",
    "moving",
    "token_account",
    "waiting",
    "row_writer",
    "packer_state",
    "epoch_report",
    "sequence_packer",
    "best_fit_packer",
    "subset_sum_packer",
    "sft",
    "buffered",
    "lockstep",
    "attention",
    "model",
    "config_data",
    "config",
    "config_check",
    "config_times",
    "config_file",
    "data",
    "data.documentation",
    "data.sft_examples",
    "data.tokenizer",
    "data.prepared",
    "data.building",
    "data.dataset",
    "data.preparing",
    "data.preparing.reading",
    "data.preparing.texts",
    "data.preparing.in_order",
    "data.preparing.shard_writer",
    "data.preparing.chunks",
    "data.preparing.write_shards",
    "data.preparing.tokenizer_texts",
    "prepare",
    "data.corpus",
    "data.text_copy",
    "data.mds_shards",
    "data.mds",
    "data.mds_documents",
    "data.streams",
    "data.streamed",
    "data.sampler",
    "data.stream_sampler",
    "data.sources",
    "leaving",
    "data.loader",
    "redealing",
    "resuming",
    "dataspec",
    "callbacks",
    "optim",
    "composer_model",
    "checkpoints",
    "stopping",
    "object_store",
    "run_folder",
    "report",
]

ONLY = {
    "checks": set(),
    "compiling": {"numba"},
    "documents": {"numpy"},
    "packing": {"numpy"},
    "subset_sum": {"numpy"},
    "policies": set(),
    "source_batch": {"numpy"},
    "moving": {"numpy"},
    "masking": {"numpy"},
    "keyed_masking": {"numpy"},
    "next_tokens": {"numpy"},
    "times": set(),
    "schedules": set(),
    "waiting": {"numpy", "torch"},
    "state": set(),
    "token_account": set(),
    "packer_state": {"numpy", "torch"},
    "epoch_report": set(),
    "redealing": {"numpy", "torch"},
    "sft": {"numpy"},
    "data.sft_examples": {"numpy"},
    "buffered": set(),
    "leaving": set(),
    "data.documentation": set(),
    "data.building": {"filelock"},
    "data.preparing": set(),
    "data.preparing.texts": set(),
    "data.preparing.in_order": set(),
    "data.preparing.chunks": {"numpy"},
    "data.mds_shards": {"numpy", "torch"},
    "data.mds": {"numpy", "numba"},
    "data.mds_documents": {"numpy", "torch"},
    "config_data": {"omegaconf"},
}
"""Modules that may import these packages besides the standard library and this one."""

COMPOSER_GLUE = {
    "dataspec",
    "callbacks",
    "checkpoints",
    "optim",
    "composer_model",
    "resuming",
    "object_store",
    "run_folder",
    "stopping",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"}


def imports(path: Path, late: bool = False) -> set[str]:
    """Modules a file imports when it is loaded, and with `late` those its functions import too."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if late else list(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_one_way(module: str) -> None:
    ours = {
        name.removeprefix("composer_packing.")
        for name in imports(MODULES[module], late=True)
        if "composer_packing" in name
    }
    assert ours <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_what_it_may(module: str) -> None:
    others = {name.split(".")[0] for name in imports(MODULES[module])} - sys.stdlib_module_names - {"composer_packing"}
    assert others <= ONLY.get(module, others)
    assert ("composer" in others) <= (module in COMPOSER_GLUE)


def test_the_core_is_imported_without_composer() -> None:
    code = "import sys, composer_packing; print('composer' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_public_names_are_sorted_and_there() -> None:
    assert composer_packing.__all__ == sorted(composer_packing.__all__)
    assert all(hasattr(composer_packing, name) for name in composer_packing.__all__)


def test_files_stay_short() -> None:
    root = PACKAGE.parent
    lines = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert {name: count for name, count in lines.items() if count > 300} == {}
    assert len((root / "train.py").read_text().splitlines()) < 120
