"""Networks of all families of transformers over two processes against the same networks in one."""

from pathlib import Path

from architectures import THEIRS
from families import spec_of
from family_ranks import compare_families
from ranks import run_on_ranks


def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    specs = {name: spec_of(config, tmp_path / name)[1] for name, config in THEIRS.items()}
    run_on_ranks(2, compare_families, tmp_path, specs)
