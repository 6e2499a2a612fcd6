"""LayerInput: tensors that are identified by name, whatever their number of dimensions."""

import pytest
import torch

from megatron.model.layers.layer_input import LayerInput

B, S, H = 2, 3, 4
PARTS = {
    "positions": torch.arange(S).expand(B, S),
    "attention_span": torch.ones(B, S, 2, dtype=torch.int64),
    "encoder_hidden": torch.randn(S, B, H),
    "encoder_span": torch.zeros(B, S, 2, dtype=torch.int64),
}
BATCH = {"decoder_tokens": torch.zeros(B, 5), "decoder_positions": torch.ones(B, 5)}


@pytest.mark.parametrize(
    "names", [(), ("positions",), ("encoder_span",), ("attention_span", "encoder_span"), PARTS]
)
@pytest.mark.parametrize("batch", [None, BATCH])
def test_tensors_cross_a_pipeline_edge_under_their_names(names, batch):
    hidden = torch.randn(S, B, H)
    sent = LayerInput(hidden, **{name: PARTS[name] for name in names}, batch=batch)
    assert [*sent.tensors()] == ["hidden", *names, *sorted(batch or ())]
    packed = sent.pack()
    # DeepSpeed looks at type(): a NamedTuple would not do.
    assert packed is hidden if len(sent.tensors()) == 1 else type(packed) is tuple
    received = LayerInput.unpack(sent.tensors(), packed)
    assert received._replace(batch=None) == sent._replace(batch=None)
    assert [*received.tensors().items()] == [*sent.tensors().items()]


def test_fields_are_sent_in_the_order_of_the_type():
    sent = LayerInput(encoder_span=PARTS["encoder_span"], hidden=torch.zeros(1))
    assert [*sent._replace(positions=PARTS["positions"]).tensors()] == [
        "hidden",
        "positions",
        "encoder_span",
    ]


def test_another_number_of_tensors_than_of_names_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        LayerInput.unpack(["hidden", "positions"], torch.zeros(1))
