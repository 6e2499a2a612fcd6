"""An optional part of a network is named in its own files, and in few others of the core."""

import re

import pytest
from source import PACKAGE

from megatron.config.config import SECTIONS
from megatron.config.network.model_spec import OPTIONAL

OWN = {"moe": "expert|moe|router|upcycle", "latent": "latent", "lora": "lora|adapter|peft"} | {
    "prediction": "prediction|multi_token"
}
"""In the names of files of a part; tables of foreign formats may name any."""
MOST = {"moe": 10, "latent": 4, "lora": 13, "prediction": 12}
"""Other files of the core that name it; another one is a reason to extend the contract of parts."""


def test_config_has_a_section_for_the_flags_of_each_part() -> None:
    assert [part.section for part in OPTIONAL.values() if part.section not in SECTIONS] == []


@pytest.mark.parametrize("name", OPTIONAL)
def test_few_files_name_a_part(name: str) -> None:
    part = OPTIONAL[name]
    section = "" if part.section == "model" else rf"|\b{SECTIONS[part.section].__name__}"
    named = re.compile(rf"\b{part.__name__}\b|\.{name}\b|\b{name}=" + section)
    core = [
        file
        for file in PACKAGE.rglob("*.py")
        if not {"extensions", "families", "megatron_lm"} & {*file.parts}
        and not re.search(OWN[name], file.name)
    ]
    found = [str(f.relative_to(PACKAGE)) for f in core if named.search(f.read_text("utf-8"))]
    assert len(found) <= MOST[name], found
