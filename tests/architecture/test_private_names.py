"""Private names of other packages are used in one package, engine/deepspeed/patches."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest
from source import PACKAGE

PATCHES = "engine/deepspeed/patches/"

ELSEWHERE = {
    # Torch's own optimizers call them; there is no public form of most.
    "optimizer/lion.py": {
        name for name in dir(__import__("torch")) if name.startswith("_foreach_")
    },
    # One file that is nothing but these operators.
    "inference/runner/onednn_weights.py": {
        *("_C", "_linear_pointwise", "_make_subclass", "_reorder_linear_weight"),
        "_is_mkldnn_bf16_supported",
    },
    # Before 2.13 torch.compile has no argument for its limit.
    "fused_kernels/compilation.py": {"_dynamo"},
    # Its public forms are views, or copy.
    "fused_kernels/float8.py": {"_unsafe_view"},
    "tensor_parallel/rendezvous.py": {"_C", "_distributed_c10d"},
    # The kernel that scaled_dot_product_attention would take has no public name.
    "fused_kernels/attention_choice.py": {"_fused_sdp_choice"},
    # What `bfloat16()` and `to()` of a module call; there is no public form.
    "model/layers/router.py": {"_apply"},
    # The metadata of a distributed checkpoint are a pickle of this class: it is part of the format.
    "checkpointing/megatron_lm/distributed_writer.py": {"_StorageInfo"},
    # FlashAttention with its log-sum-exp, and backward from that of all blocks, have no public form.
    "fused_kernels/attention_blocks.py": {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    },
    # Of the standard library and others.
    "common/process_pool.py": {"_exit"},
    "training/process/launch.py": {"_exit"},
    "training/process/watchdog.py": {"_exit"},
    "training/process/stack_dump.py": {"_current_frames"},
    "inference/server/engine_thread.py": {"_current_frames"},
    "config/parsing/flags.py": {"_group_actions"},
    "data/preprocessing/sentences.py": {"_params"},
    "tokenizer/bounded_jinja.py": {"_parse"},
}
"""Files and the private names that they may use."""

PUBLIC = {"_replace", "_asdict", "_fields"}  # of named tuples


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of other modules that `source` imports, reads or sets."""
    tree = ast.parse(source)
    own = set(_own_names(tree))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "")[-4:] == "attr":
            names = [
                argument.value
                for argument in node.args[1:2]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        yield from (
            name for name in names if _is_private(name) and (name not in own or _is_override(node))
        )


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Yield what the classes of a module define themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_override(node: ast.AST) -> bool:
    """Whether `node` is an attribute of super()."""
    return ast.unparse(getattr(node, "value", ast.Tuple())) == "super()"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


@cache
def private_names_by_file() -> dict[str, set[str]]:
    """Return the private names that each file of the package uses, but the patches."""
    files = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    return {
        name: found
        for name, file in sorted(files.items())
        if not name.startswith(PATCHES)
        and (found := {*private_names(file.read_text(encoding="utf-8"))})
    }


def test_private_names_of_others_are_used_by_the_patches_alone():
    used = private_names_by_file().items()
    found = {name: names - ELSEWHERE.get(name, set()) for name, names in used}
    assert {name: names for name, names in found.items() if names} == {}


def test_every_exception_is_needed():
    found = private_names_by_file()
    assert [name for name, names in ELSEWHERE.items() if not names & found.get(name, set())] == []


@pytest.mark.parametrize(
    "line",
    [
        "engine._INSTRUCTION_MAP = {}",
        "norm = getattr(engine.optimizer, '_global_grad_norm', None)",
        "if hasattr(parameter, '_hp_mapping'): parameter.grad = None",
        "from torch._C import _nn",
        "import torch._dynamo",
        "class Own(Base):\n    def method(self):\n        return self.engine._optimizer",
        "class Own(Base):\n    def _tied(self):\n        super()._tied()",
    ],
)
def test_a_private_name_of_others_is_found(line):
    assert [*private_names(line)]


@pytest.mark.parametrize(
    "line",
    ["self._engine = engine", "inputs._replace(x=1)", "class A:\n    def __len__(self): ..."],
)
def test_own_and_public_names_are_not_found(line):
    assert [*private_names(line)] == []
