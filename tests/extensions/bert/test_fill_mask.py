"""tools/fill_mask.py: texts that have no score."""

from pathlib import Path
from types import SimpleNamespace

from masked_lms import masked_lm
from problems import problem
from scripts import module_of

from megatron.extensions.bert import inference as loading
from megatron.extensions.bert.inference_flags import FillMaskConfig

TOOL = Path(__file__).resolve().parents[3] / "tools" / "fill_mask.py"


def test_empty_texts_are_refused_before_any_is_scored(group, tmp_path, monkeypatch, capsys):
    tool = module_of(TOOL)
    source = SimpleNamespace(own={"fill_mask": FillMaskConfig(text=["a", "", "b", " "])})
    monkeypatch.setattr(tool, "read_model_source", lambda *args, **kwargs: source)
    monkeypatch.setattr(loading, "load_masked_lm", lambda source: (masked_lm(tmp_path), True))
    with problem("text 2 of 4, '' … no tokens") as refused:
        tool.main([])
    assert len(refused.value.problems) == 2
    assert capsys.readouterr().out == ""
