"""Members of enumerations that a Python pickled by name."""

from collections import OrderedDict
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from problems import problem

from megatron.checkpointing.resharding.unpickle import (
    Opaque,
    read_foreign,
    read_state,
    read_tensors,
)
from megatron.common.errors import CheckpointError


class Named:
    """Pickled as members of an enumeration are by early versions of Python 3.11."""

    def __init__(self, owner, name):
        self.words = owner, name

    def __reduce__(self):
        return getattr, self.words


@pytest.mark.parametrize("read", [read_tensors, read_state, read_foreign])
def test_members_are_read_by_value_and_by_name(tmp_path, read):
    for stage in (ZeroStageEnum.gradients, Named(ZeroStageEnum, "gradients")):
        torch.save({"zero_stage": stage}, tmp_path / "file.pt")
        assert read(tmp_path / "file.pt")["zero_stage"] == 2


@pytest.mark.parametrize("read", [read_tensors, read_state, read_foreign])
@pytest.mark.parametrize(
    "words", [(ZeroStageEnum, "mro"), ([], "append"), (OrderedDict, "fromkeys")]
)
def test_other_attributes_are_refused(tmp_path, read, words):
    torch.save({"zero_stage": Named(*words)}, tmp_path / "file.pt")
    with problem("file.pt … getattr", CheckpointError):
        read(tmp_path / "file.pt")


def test_members_of_other_programs_stand_for_themselves(tmp_path):
    torch.save(Named(torch.serialization.LoadEndianness, "NATIVE"), tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    changed = content.replace(
        b"torch.serialization\nLoadEndianness", b"megatron.model.enum\nSomeAttention1"
    )
    (tmp_path / "file.pt").write_bytes(changed)
    found = read_foreign(tmp_path / "file.pt")
    assert isinstance(found, Opaque)
    assert found.parts == ("NATIVE",)


@pytest.mark.parametrize("read", [read_tensors, read_foreign])
def test_compressed_archives_are_refused(tmp_path, read):
    """Their members would be mapped as they are, and taken for weights."""
    torch.save({"a": torch.zeros(100_000), "b": torch.zeros(9)}, tmp_path / "file.pt")
    with (
        ZipFile(tmp_path / "file.pt") as stored,
        ZipFile(tmp_path / "again.pt", "w", ZIP_DEFLATED) as again,
    ):
        for name in stored.namelist():
            again.writestr(name, stored.read(name))
    with problem("again.pt … compressed … zip -0", CheckpointError):
        read(tmp_path / "again.pt")
