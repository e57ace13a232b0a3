"""The direction of imports, read from the source: ws_server -> streamkv -> tiers -> kernels."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["kernels", "tiers", "streamkv", "ws_server"]  # each may import those before it
OWNERS = {
    "lmdb": {"tiers/ssd.py"},
    "zstandard": {"tiers/codec.py", "tiers/planes.py"},
    "isal": {"tiers/checksum.py"},
    "prometheus_client": {"streamkv/metric_kinds.py", "streamkv/metrics.py", "streamkv/engine.py"},
    "transformers": {"streamkv/tokenizer.py"},
    "tokenizers": {"streamkv/tokenizer.py"},
}


class Import(NamedTuple):
    file: str
    module: str
    in_function: bool


def imports() -> Iterator[Import]:
    """Every import statement of the product, `TYPE_CHECKING` blocks left out."""
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            yield from walk(ast.parse(path.read_text()), file, in_function=False)


def walk(node: ast.AST, file: str, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, alias.name, in_function)
        elif isinstance(child, ast.ImportFrom) and child.module:
            if child.module in ("streamkv", "streamkv.kernels"):
                for alias in child.names:
                    yield Import(file, f"{child.module}.{alias.name}", in_function)
            else:
                yield Import(file, child.module, in_function)
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from walk(child, file, inside)


def layer_of_module(module: str) -> str | None:
    """Layer that an imported module belongs to; `None` if it is none of ours."""
    parts = module.split(".")
    if parts[0] != "streamkv":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "streamkv"


def test_imports_go_one_way() -> None:
    wrong = []
    for found in imports():
        layer, target = found.file.split("/")[0], layer_of_module(found.module)
        if target is None or found.module.startswith("streamkv.errors"):
            continue
        from_cli = found.file.startswith("streamkv/cli/") and found.in_function
        if LAYERS.index(target) > LAYERS.index(layer) and not from_cli:
            wrong.append(found)
    assert wrong == []


def test_errors_import_nothing() -> None:
    assert [found for found in imports() if found.file == "streamkv/errors.py"] == []


def test_each_foreign_library_has_its_one_place() -> None:
    wrong = []
    for found in imports():
        name = found.module.split(".")[0]
        is_model = found.file.startswith("streamkv/model")
        allowed = OWNERS.get(name)
        if name == "websockets" and not found.file.startswith("ws_server/"):
            wrong.append(found)
        if allowed is None or found.file in allowed:
            continue
        if not (is_model and name in ("transformers", "tokenizers")):
            wrong.append(found)
    assert wrong == []


@pytest.mark.parametrize(
    "file", ["window", "block_table", "sequence", "scheduler", "journal_records", "sampling_params"]
)
def test_bookkeeping_knows_no_torch(file: str) -> None:
    names = {
        found.module.split(".")[0] for found in imports() if found.file == f"streamkv/{file}.py"
    }
    assert not names & {"torch", "numpy", "os", "time", "threading"}


def test_transformers_can_be_imported_from_the_repository() -> None:
    """transformers imports a folder `kernels` of the current directory: ours must be harmless."""
    code = "import transformers.integrations.hub_kernels as found; print(bool(found))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    assert [type(node) for node in tree.body] == [ast.Expr]
