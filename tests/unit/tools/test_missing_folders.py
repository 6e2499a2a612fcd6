"""A folder or file that is not there is a mistake of the command, which another attempt meets again."""

import runpy
import sys
from pathlib import Path

import pytest

from megatron.common.errors import ExitCode, MegatronError

REPOSITORY = Path(__file__).resolve().parents[3]
COMMANDS = [
    "tools/why_step.py 3 --load none",
    "tools/watch.py none",
    "tools/tb/rebuild.py --load none --tensorboard-dir new",
    "tools/generate_samples_gpt.py --load none",
    "tools/checkpoint/digest.py none",
    "tools/checkpoint/inspect.py none",
    "tools/checkpoint/util.py --model-type GPT --load-dir none --save-dir new",
    "tools/convert_checkpoint/ds_to_universal.py --input_folder none --output_folder new",
    "tools/convert_checkpoint/from_hf.py --load none --save new",
    "tools/convert_checkpoint/inspect_checkpoint.py none",
    "tools/convert_checkpoint/to_hf.py --load none --save new",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_there_is_a_mistake_of_the_command(command, tmp_path, monkeypatch):
    file, *words = command.split()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nones").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    main = runpy.run_path(str(REPOSITORY / file))["main"]
    with pytest.raises(MegatronError, match="none.*(does not exist|o such|holds no)") as error:
        main(words)
    assert "did you mean nones?" in str(error.value)
    assert error.value.exit_code is ExitCode.MISUSED
    assert not (tmp_path / "new").exists()
