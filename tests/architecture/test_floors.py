"""The floors of the house: what may import what."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest
from floors import FLOOR_OF, imports_between_parts, part_of
from source import (
    PACKAGE,
    REPOSITORY,
    SCRIPTS,
    files_of,
    import_graph,
    imported_libraries,
    imported_modules,
    module_name,
)

WITHOUT_TORCH = (
    "common",
    "config",
    "pipeline",
    "planner",
    "tokenizer",
    "data",
    "diagnostics/monitor",
)


def upward_imports(package: Path) -> list[str]:
    """Return 'file: module' for every import between parts that does not go down."""
    return [
        line
        for (here, there), lines in imports_between_parts(package).items()
        for line in lines
        if FLOOR_OF[there] >= FLOOR_OF[here]
    ]


def test_imports_go_down():
    assert upward_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("config/plan/plan.py", "from megatron.training.loop.loop import train"),
        ("config/plan/plan.py", "import megatron.model.gpt"),
        ("config/plan/plan.py", "import megatron.extensions.tasks.flags"),
        ("tokenizer/build.py", "from megatron.data.readers.inputs import Block"),
        ("tensor_parallel/loss.py", "from megatron.fused_kernels.registry import KERNELS"),
        ("common/errors.py", "from megatron.config.plan.plan import plan"),
        ("inference/engine/engine.py", "from megatron.inference.server.app import app"),
        ("model/gpt.py", "def lazy():\n    from megatron.engine import engine"),
    ],
)
def test_an_import_sideways_or_up_is_found(tmp_path, importer, line):
    file = tmp_path / "megatron" / importer
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line)
    assert len(upward_imports(tmp_path / "megatron")) == 1


def test_every_part_has_a_floor():
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
    assert {part_of(module_name(file)) for file in files} == set(FLOOR_OF)


def test_modules_do_not_import_in_circles():
    graph = import_graph()
    assert len([*TopologicalSorter(graph).static_order()]) == len(graph)


def test_nothing_imports_an_entry_point():
    started = [script for script in SCRIPTS if '__name__ == "__main__"' in script.read_text()]
    # tools/checkpoint/inspect.py is not what `import inspect` finds.
    entries = {script.stem for script in started} - sys.stdlib_module_names | {"tools", "tasks"}
    importers = [*PACKAGE.rglob("*.py"), *SCRIPTS]
    assert [str(file) for file in importers if imported_libraries(file) & entries] == []


def test_package_init_files_are_empty():
    """But for the version of the package, and the docstring of an extension."""
    for file in {*PACKAGE.rglob("__init__.py")} - {PACKAGE / "__init__.py"}:
        is_extension = file.parent.parent == PACKAGE / "extensions"
        body = ast.parse(file.read_text()).body
        assert bool(ast.get_docstring(ast.Module(body, []))) == is_extension, file
        assert len(body) == is_extension, file


def test_every_folder_of_the_package_is_a_package():
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


WITH_ROUTES = {
    *("inference.server", "extensions.openai_api"),
    *("extensions.masked_lm", "extensions.bert", "extensions.t5"),
}


@pytest.mark.parametrize(
    ("library", "parts"),
    [
        ("deepspeed", {"engine"}),
        (
            "transformers",
            {
                *("tokenizer", "checkpointing", "inference.evaluation", "inference.loading"),
                *("extensions.retro", "extensions.detox"),
            },
        ),
        ("profanity_check", {"extensions.detox"}),
        ("mwparserfromhell", {"extensions.corpora"}),
        ("huggingface_hub", {"checkpointing", "extensions.corpora", "tokenizer"}),
        ("datasets", {"extensions.corpora"}),
        ("trafilatura", {"extensions.corpora"}),
        ("tokenizers", {"tokenizer"}),
        ("triton", {"fused_kernels"}),
        ("flash_attn", {"fused_kernels"}),
        ("apex", {"fused_kernels", "optimizer"}),
        ("torchao", {"fused_kernels"}),
        ("bitsandbytes", {"optimizer"}),
        ("fastapi", WITH_ROUTES),
        ("starlette", WITH_ROUTES),
        ("pydantic", WITH_ROUTES),
        ("uvicorn", {"inference.server"}),
        ("prometheus_client", {"inference.server"}),
        ("lm_eval", {"inference.evaluation"}),
    ],
)
def test_a_library_has_one_door(library, parts):
    users = [file for file in PACKAGE.rglob("*.py") if library in imported_libraries(file)]
    assert {part_of(module_name(file)) for file in users} <= parts


def test_config_and_planner_need_the_standard_library_only():
    own = {"megatron", *sys.stdlib_module_names}
    foreign = {
        (file.name, library)
        for file in files_of("common", "config", "pipeline", "planner")
        for library in imported_libraries(file) - own
    }
    libraries = {("files.py", "yaml"), ("host_memory.py", "psutil"), ("remote_files.py", "fsspec")}
    libraries |= {("progress.py", "tqdm")}  # of work under way
    assert foreign <= libraries


def test_yaml_is_imported_only_when_a_file_is_read():
    at_top = ast.parse((PACKAGE / "config/parsing/files.py").read_text()).body
    names = [alias.name for node in at_top if isinstance(node, ast.Import) for alias in node.names]
    assert "yaml" not in names


def test_torch_is_not_needed_for_files_plans_and_tokens():
    modules = [
        module_name(file)
        for file in files_of(*WITHOUT_TORCH)
        if file.name != "__init__.py" and "datasets" not in file.parts
    ]
    modules += ["megatron.checkpointing.manifest", "megatron.checkpointing.publish"]
    modules += ["megatron.extensions.retro.embedders"]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print(*sorted({'torch', 'deepspeed', 'transformers'} & sys.modules.keys()))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def test_one_file_reads_the_environment():
    readers = {
        str(file.relative_to(REPOSITORY))
        for file in (*PACKAGE.rglob("*.py"), *SCRIPTS)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    # How many threads a library starts is set where it is loaded, before it is.
    tools = {"tools/merge_preprocessed_data.py", "tools/preprocess_data.py"}
    assert readers - tools == {
        "megatron/training/process/environment.py",
        "megatron/common/process_pool.py",
    }


@pytest.mark.parametrize(
    ("name", "importers"),
    [
        # Entries of runs and notebooks; a table of measurements holds command lines.
        ("config.parse_config", {"api", "training.entry", "planner.calibration"}),
        ("config.parse_conversion", {"extensions.tasks.entry"}),
        ("config.parse_config_for_checkpoint", {"inference.loading.model_source"}),
        # What is printed, or goes on to an entry.
        (
            "config.words_of",
            {"api", "extensions.tasks.entry", "checkpointing.hugging_face.import_model"},
        ),
        ("parsing.files.flag_words", {"config.config"}),
        # Before flags can be parsed: extensions, and the checkpoint whose settings are defaults.
        (
            "parsing.parser.peek",
            {
                *("config.config", "config.parsing.files", "config.parsing.settings"),
                *("extensions.retro.retrieval.project", "extensions.tasks.entry"),
                "extensions.nemo.flags",
            },
        ),
        (
            "config.options_given",
            {"training.entry", "checkpointing.saved_run", "inference.loading.model_source"},
        ),
    ],
)
def test_command_lines_are_read_and_written_at_the_edges(name: str, importers: set[str]) -> None:
    found = {
        module_name(file).removeprefix("megatron.")
        for file in PACKAGE.rglob("*.py")
        if f"megatron.config.{name}" in imported_modules(file)
    }
    # Within the file of its definition a function is not imported.
    assert found == importers


def test_a_bare_string_is_a_docstring_or_stands_under_what_it_explains():
    files = [*PACKAGE.rglob("*.py"), *SCRIPTS]
    assert [f"{file}:{line}" for file in files for line in stray_strings(file)] == []


def test_a_stray_string_is_found(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Doc."""\nx = 1\n"""Of x."""\ndef f():\n    y = x\n    """Stray."""\n')
    assert stray_strings(file) == [6]


def stray_strings(file: Path) -> list[int]:
    """Return the lines of string statements that document nothing."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    documenting = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documenting |= set(node.body[:1])
        if isinstance(node, ast.Module | ast.ClassDef):
            documenting |= {
                below
                for above, below in pairwise(node.body)
                if isinstance(above, ast.AnnAssign | ast.Assign)
            }
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node not in documenting
    ]


def test_test_files_have_names_of_their_own():
    """Their folders are no packages: of two equal names pytest collects one."""
    names = sorted(file.name for file in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [one for one, following in pairwise(names) if one == following] == []


def test_nothing_is_imported_from_a_conftest():
    """Of several, the one that bears the name depends on which tests are run."""
    files = (REPOSITORY / "tests").rglob("*.py")
    assert [str(file) for file in files if "conftest" in imported_libraries(file)] == []
