"""Output of JSON lines that a later attempt continues."""

import pytest
from problems import problem

from megatron.common.errors import BusyError, DataError
from megatron.extensions.corpora.cleaning.resumable import resumable_output


def attempt(path, lines, *, dies_after=None, **options):
    """Write `lines` but for those of earlier attempts; return how many these were."""
    with resumable_output(str(path), options) as output:
        for line in lines[output.earlier : dies_after]:
            output.write(line)
        if dies_after is not None:
            raise KeyboardInterrupt
    return output.earlier


def test_an_attempt_continues_the_one_before(tmp_path):
    path, lines = tmp_path / "out", [b'{"n": %d}' % i for i in range(5)]
    for dies_after in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            attempt(path, lines, dies_after=dies_after, seed=1)
        assert not path.exists()
    partial = tmp_path / "out.partial"
    with partial.open("ab") as file:
        file.write(b'{"n": 3')  # a process that was killed while it wrote
    assert attempt(path, lines, seed=1) == 3
    assert path.read_bytes() == b"".join(line + b"\n" for line in lines)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("header", [b"", b'{"se'])
def test_a_header_that_was_not_written_to_its_end_is_written_again(tmp_path, header):
    (tmp_path / "out.partial").write_bytes(header)
    assert attempt(tmp_path / "out", [b"{}"], seed=1) == 0
    assert (tmp_path / "out").read_bytes() == b"{}\n"


def test_other_options_do_not_continue(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "out", [b"{}"], dies_after=1, seed=1, top_p=0.9)
    before = (tmp_path / "out.partial").read_bytes()
    with problem("out.partial … other options … seed"):
        attempt(tmp_path / "out", [b"{}"], seed=2, top_p=0.9)
    assert (tmp_path / "out.partial").read_bytes() == before


def test_an_attempt_without_a_line_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "out", [], dies_after=0)
    assert [*tmp_path.iterdir()] == []


def test_two_processes_do_not_write_the_same_file(tmp_path):
    with resumable_output(str(tmp_path / "out"), {}) as output:
        output.write(b"{}")
        with problem("another process", BusyError):
            attempt(tmp_path / "out", [b"{}"])
    assert (tmp_path / "out").read_bytes() == b"{}\n"


def test_an_input_is_not_replaced_and_a_missing_folder_is_reported(tmp_path):
    (tmp_path / "in").write_text("{}\n")
    path = str(tmp_path / "in")
    with (
        problem("read and replaced"),
        resumable_output(path, {}, inputs=[path]),
    ):
        pass
    with problem("cannot write … none/out", DataError):
        attempt(tmp_path / "none" / "out", [])
