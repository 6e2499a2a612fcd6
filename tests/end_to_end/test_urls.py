"""A run on token files and checkpoints in object storage equals a local one, bit for bit."""

from pathlib import Path

from jobs import Corpus, start_ranks
from object_store import BUCKET, SECRET, Store
from test_resume import ITERATIONS, RUN, assert_same_files, journal_values

from megatron.checkpointing.remote import remote_tags
from megatron.common.remote_files import local_path, upload


def test_a_run_on_urls_resumed_on_another_machine_equals_a_local_one(
    corpus: Corpus, store: Store, tmp_path: Path
) -> None:
    flags = [*RUN, *ITERATIONS, "--zero-stage", "1", "--async-save"]
    whole, run = tmp_path / "whole", f"{BUCKET}/run"
    start_ranks(2, *flags, *corpus.flags, "--save", str(whole)).succeeded()
    for end in (".bin", ".bin.xxh3", ".idx", ".tokenizer.json"):
        upload(Path(f"{corpus.prefix}{end}"), f"{BUCKET}/tokens{end}")
    flags += [*corpus.flags, "--data-path", f"{BUCKET}/tokens", "--save", run, "--load", run]
    store.proxy.cut_next(5, after=20_000)
    for machine, exit_interval in (("first", "4"), ("second", "8")):
        cache = ["--object-storage-cache-path", str(tmp_path / machine)]
        done = start_ranks(2, *flags, *cache, "--exit-interval", exit_interval).succeeded()
        for output in done.outputs:
            assert SECRET not in output
            assert "AKIA" not in output
    assert store.proxy.cut == 5
    assert remote_tags(run) == ["global_step8", "global_step4"]
    last = local_path(run, tmp_path / "second")
    assert journal_values(last, "train") == journal_values(whole, "train")[4:]
    assert_same_files(whole / "global_step8", last / "global_step8")
