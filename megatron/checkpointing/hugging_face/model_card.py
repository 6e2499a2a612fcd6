"""Model card (README.md) of an exported model: network, training progress, logit check."""

from collections.abc import Sequence

from megatron.checkpointing.hugging_face.families.family import Family
from megatron.checkpointing.hugging_face.logit_check import LogitDifference
from megatron.checkpointing.manifest import Manifest
from megatron.config.network.model_spec import ModelSpec, flat

_GENERATE = """\
from transformers import pipeline

generate = pipeline("text-generation", model="PATH")
print(generate("Once upon a time", max_new_tokens=40)[0]["generated_text"])
"""
_FILL = """\
from transformers import pipeline

fill = pipeline("fill-mask", model="PATH")
print(fill("Once upon a [MASK].")[0]["token_str"])
"""
_CLASSIFY = """\
from transformers import pipeline

classify = pipeline("text-classification", model="PATH")
print(classify("A text."))
print(classify({"text": "A text.", "text_pair": "A second text, of a task with pairs."}))
"""
_TAG = """\
from transformers import pipeline

tag = pipeline("token-classification", model="PATH", aggregation_strategy="first")
print(tag("Words of a sentence"))
"""
_ANSWER = """\
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForQuestionAnswering.from_pretrained("PATH")
tokens = tokenizer("Which question?", "The context of its answer.", return_tensors="pt")
output = model(**tokens)
first, last = output.start_logits.argmax(), output.end_logits.argmax()
print(tokenizer.decode(tokens["input_ids"][0, first : last + 1]))
"""
_CHOOSE = """\
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForMultipleChoice.from_pretrained("PATH")
texts = [["Question and first choice", "article"], ["Question and second choice", "article"]]
tokens = tokenizer(texts, padding=True, return_tensors="pt")
print(model(**{name: rows[None] for name, rows in tokens.items()}).logits.argmax())
"""
_USE = {
    "AutoModelForCausalLM": ("text-generation", _GENERATE),
    "AutoModelForPreTraining": ("fill-mask", _FILL),
    "AutoModelForSequenceClassification": ("text-classification", _CLASSIFY),
    "AutoModelForTokenClassification": ("token-classification", _TAG),
    "AutoModelForQuestionAnswering": ("question-answering", _ANSWER),
    "AutoModelForMultipleChoice": ("multiple-choice", _CHOOSE),
}
"""Tag of the card, and an example, by the model's auto class in transformers."""


def model_card(
    manifest: Manifest,
    spec: ModelSpec,
    family: Family,
    *,
    dtype: str,
    measured: Sequence[LogitDifference],
    tokenizer: str,
    chat_template: str,
    for_release: bool,
    remaining: LogitDifference | None = None,
) -> str:
    """Return the text of the card.

    Args:
        dtype: of the files.
        measured: result of the logit check; empty if it was skipped.
        remaining: difference from the network that was trained, where another one is computed.
        tokenizer: why none was written, or "".
        chat_template: origin of the chat template, or "".
        for_release: whether to leave out the training progress.
    """
    tag, example = _USE[family.auto_class]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"pipeline_tag: {tag}",
            "---",
            "",
            f"# {family.architecture}, {spec.num_parameters:,} parameters",
            "",
            *_network(spec, family, dtype),
            *([f"| chat template | {chat_template} |"] if chat_template else []),
            *([] if for_release else _training(manifest)),
            "",
            "## Equality",
            "",
            *_equality(measured),
            *(_remaining(spec, remaining) if remaining else []),
            "",
            *(
                ["## Use", "", "```python", f"{example}```", ""]
                if not tokenizer
                else [f"There is no tokenizer here: {tokenizer}.", ""]
            ),
        ]
    )


def _network(spec: ModelSpec, family: Family, dtype: str) -> list[str]:
    rows = {
        "architecture": f"{family.architecture} ({family.model_type})",
        "layers": spec.num_layers,
        "hidden size": spec.hidden_size,
        "MLP hidden size": spec.mlp.ffn_hidden_size,
        "attention heads": spec.attention.num_attention_heads,
        "key/value heads": spec.attention.num_query_groups,
        "positions": f"{spec.positions.position_embedding}, {spec.positions.max_position_embeddings}",
        "vocabulary": spec.vocabulary.vocab_size,
        "dtype": dtype,
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _training(manifest: Manifest) -> list[str]:
    state, objective = manifest.state, manifest.objective.name
    if objective == "prefix-lm":
        objective += ": tokens of a prefix saw each other in training; here attention is causal"
    rows = {
        "trained with": f"Megatron-DeepSpeed {manifest.versions.get('megatron', '')}".strip(),
        "objective": objective,
        "dtype of the training": manifest.precision.dtype,
        "optimizer steps": f"{state.iteration:,}",
        "samples": f"{state.samples:,}",
        "tokens": f"{state.tokens:,}",
        "sequence length": manifest.spec.seq_length,
    }
    return [f"| {name} | {value} |" for name, value in rows.items()]


def _equality(measured: Sequence[LogitDifference]) -> list[str]:
    if not measured:
        return ["Not verified: converted with --no-verify."]
    return [
        "Logits of transformers' model, as loaded from these files, compared with the trained",
        "network on the same tokens:",
        "",
        *(f"* {one}" for one in measured),
    ]


def _remaining(spec: ModelSpec, remaining: LogitDifference) -> list[str]:
    in_head = flat(spec)["head_activation"]
    return [
        "",
        "One error remains. transformers has one activation for the MLP and before the logits.",
        f"The network was trained with {spec.mlp.activation} in the MLP and {in_head} before",
        f"the logits, and transformers computes {spec.mlp.activation} in both; above, the network",
        "computes that too. Against the network as it was trained:",
        "",
        f"* {remaining}",
    ]
