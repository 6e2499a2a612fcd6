"""Conversations as tokens: which of them are answers, as in transformers."""

import json

import pytest
from problems import problem
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron.common.errors import ConfigError, DataError
from megatron.data.datasets.packed_dataset import ChatDataset
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.tokenizer import bounded_jinja
from megatron.tokenizer.chat import ChatTemplate, ChatTokenizer, read_chat_template
from megatron.tokenizer.fingerprint import describe, differences, read_record
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
BEGIN = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
END = (
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = BEGIN + "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}" + END
UNMARKED = BEGIN + "{{ m.content }}{{ eos_token }}" + END
FORGETFUL = BEGIN + "{% if loop.last %}{{ m.content }}{% endif %}{{ eos_token }}" + END
CHAT = [
    {"role": "user", "content": "ab é"},
    {"role": "assistant", "content": "你 ab"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "a"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with a template, as transformers saves it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, "ab", "Ġab"])}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
                "chat_template": [{"name": "default", "template": MARKED}],
            }
        )
    )
    return folder


def chats(folder, source=None):
    template = read_chat_template(None, str(folder))
    if source is not None:
        template = ChatTemplate(source, template.names)
    return ChatTokenizer(PretrainedFromHF(folder), template)


def test_tokens_and_answers_are_those_of_transformers(folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    ).apply_chat_template(
        CHAT, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, counts = chats(folder).encode_conversation({"messages": CHAT})
    assert tokens.tolist() == theirs["input_ids"]
    assert counts.tolist() == [bool(one) for one in theirs["assistant_masks"]]
    assert 0 < counts.sum() < len(counts)


def test_a_template_without_marks_is_compared_with_itself(folder):
    marked, found = (
        chats(folder, source).encode_conversation({"messages": CHAT})
        for source in (MARKED, UNMARKED)
    )
    assert marked[0].tolist() == found[0].tolist()
    assert marked[1].tolist() == found[1].tolist()


def test_a_completion_follows_its_prompt(folder):
    tokens, counts = chats(folder).encode_conversation({"prompt": "ab", "completion": " ab a"})
    tokenizer = PretrainedFromHF(folder)
    assert [tokenizer.decode([i]) for i in tokens] == ["ab", " ab", " ", "a"]
    assert counts.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        (MARKED, {"prompt": "ab ", "completion": "ab"}, "' ab' … answer"),
        (MARKED, {"prompt": "ab", "completion": ""}, "completion … empty"),
        (MARKED, {"text": "ab"}, "messages … 'text'"),
        (MARKED, [1], "JSON object"),
        (MARKED, {"messages": []}, "list … one"),
        (MARKED, {"messages": [{"content": "a"}]}, "message 1 … role"),
        (MARKED, {"messages": [{"role": "user"}]}, "message 1 … content"),
        (MARKED, {"messages": CHAT[:1]}, "role assistant"),
        (FORGETFUL, {"messages": CHAT}, "message 2: … chat template"),
        (
            MARKED.replace("{{ m.content }}{{ eos_token }}", ""),
            {"messages": CHAT},
            "empty",
        ),
        ("{{ raise_exception('odd roles') }}", {"messages": CHAT}, "chat template … odd roles"),
        ("a\n{{ b }", {"messages": CHAT}, "Jinja: line 2: "),
        ("", {"messages": CHAT}, "no chat template … file"),
    ],
)
def test_an_answer_that_cannot_be_located_is_refused(folder, source, line, message):
    with problem(message, DataError):
        chats(folder, source).encode_conversation(line)


def flags_of(folder, tmp_path, *more):
    return [
        *("--input", str(tmp_path / "chats.jsonl"), "--output-prefix", str(tmp_path / "chats")),
        *("--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder)),
        *more,
    ]


def converted(folder, tmp_path, lines, *more):
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    flags = flags_of(folder, tmp_path, "--conversations", *more)
    return preprocess(read_flags(flags, description="").spec)


def test_files_hold_the_conversations_and_samples_uncut_ones(folder, tmp_path):
    lines = [{"messages": CHAT}, {"prompt": "a", "completion": " b"}] * 3
    converted(folder, tmp_path, lines, "--append-eod")
    parts = [
        IndexedDataset(str(tmp_path / f"chats_{key}_document")) for key in ("tokens", "loss_mask")
    ]
    for i, line in enumerate(lines):
        tokens, counts = chats(folder).encode_conversation(line)
        assert parts[0][i].tolist() == [*tokens, 1]
        assert parts[1][i].tolist() == [*counts, 1]
    dataset = ChatDataset(*parts, range(6), num_samples=4, seq_length=29, seed=1)
    for i in range(4):
        row, position = dataset[i], 0
        for number, piece in enumerate(dataset.origin(i).pieces, start=1):
            here = slice(position, position := position + piece.stop)
            assert row["tokens"][here].tolist() == parts[0][piece.document].tolist()
            assert row["is_target"][here].tolist() == parts[1][piece.document].tolist()
            assert set(row["text_ids"][here]) == {number}
        assert not any(field[position:].any() for field in row.values())
    assert dataset.num_tokens == sum(parts[0].sizes)
    with IndexedDatasetWriter(tmp_path / "short", "u2") as writer:
        writer.append([1])
    short = IndexedDataset(str(tmp_path / "short"))
    with problem("chats_tokens_document … /short … tokens", DataError):
        ChatDataset(parts[0], short, range(1), num_samples=1, seq_length=29, seed=1)


def test_the_record_beside_the_files_holds_the_template(folder, tmp_path):
    for source in (None, UNMARKED):
        (tmp_path / "chat.jinja").write_text(source or "")
        more = ["--chat-template", str(tmp_path / "chat.jinja")] if source else []
        for written in converted(folder, tmp_path, [{"messages": CHAT}], *more):
            record = read_record(written.prefix)
            assert record.chat_template == (source or MARKED)
            assert differences(record, describe(PretrainedFromHF(folder))) == []


def test_a_bad_conversation_names_its_file_and_line(folder, tmp_path):
    good = {"messages": CHAT}
    with problem("chats.jsonl, line 2: … assistant", DataError):
        converted(folder, tmp_path, [good, {"messages": CHAT[:1]}, good])
    written = converted(folder, tmp_path, [good, {"messages": CHAT[:1]}, 5], "--on-error", "skip")
    assert [(each.documents, each.bad) for each in written] == [(1, 2), (1, 2)]


def test_flags_of_texts_are_refused(folder, tmp_path):
    (tmp_path / "chats.jsonl").touch()
    flags = flags_of(folder, tmp_path, "--json-keys", "messages", "--split-sentences")
    with pytest.raises(ConfigError) as error:
        read_flags([*flags, "--conversations"], description="")
    assert [text.split()[0] for text in error.value.problems] == [
        "--json-keys",
        "--split-sentences",
    ]
    with problem("--chat-template … --conversations"):
        read_flags(flags_of(folder, tmp_path, "--chat-template", "x"), description="")


@pytest.fixture
def small_limits(monkeypatch):
    """Limits of a hundredth of the steps and memory, which are reached as fast."""
    for name, limit in {"MOST_STEPS": 20_000, "_MOST_TOTAL": 1 << 26}.items():
        monkeypatch.setattr(bounded_jinja, name, limit)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "20000 steps",
        ),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10 ** 9 }}", "1000000000 characters"),
        ("{{ 10 ** 9 * 'a' }}", "1000000000 characters"),
        ("{{ ('a' * 10 ** 7) + ('a' * 10 ** 7) }}", "20000000 characters"),
        ("{{ 9 ** (9 ** 9) }}", "65536 bits"),
        ("{{ 'a'.ljust(10 ** 9) }}", "1000000000 characters"),
        (
            "{% set ns = namespace(s='a' * 9 ** 7) %}"
            "{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "16777216 characters",
        ),
        ("{% for i in range(9) %}{{ 'a' * 9 ** 7 }}{% endfor %}", "16777216 characters"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "20000 steps",
        ),
        (
            "{% for i in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
            "{% endfor %}",
            "20000 steps",
        ),
    ],
)
def test_endless_templates_end(source, reason, small_limits):
    with problem(f"chat template … {reason}", DataError):
        ChatTemplate(source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ [1]|slice(10**8)|list|length }}",
        "{{ [1]|slice(100000000)|list|length }}",
        "{{ [1]|batch(100000000, 0)|list|length }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a\n'|indent(1000000000, first=true) }}",
        "{{ ('\n' * 60000)|indent(60000) }}",
        "{{ 1.5|round(1000000000) }}",
        "{{ {'a': 1}|tojson(indent=1000000000) }}",
        "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ range(99999)|join('b' * 10**6) }}",
        "{{ range(99999)|map('string')|join('b' * 10**6) }}",
        "{{ ('b' * 10**6).join('a' * 10**6) }}",
        "{{ '%9999999999d'|format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ ('\t' * 10**6).expandtabs(10**6) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ 'a'.ljust(width=10**10) }}",
        "{{ lipsum(10**9) }}",
        "{% for i in range(99999) %}{% for j in range(9) %}"
        + "a" * 1000
        + "{% endfor %}{% endfor %}",
        "{% set n = namespace(l=[]) %}{% for i in range(99999) %}"
        "{% set n.l = n.l + ['a' * 10**7] %}{% endfor %}",
    ],
)
def test_templates_do_not_take_the_memory(source, small_limits):
    with problem("chat template refuses", DataError):
        ChatTemplate(source).render(CHAT)


def test_limits_change_nothing_of_what_filters_show():
    source = (
        "{{ messages|map(attribute='role')|join(', ') }}|{{ 1700000000|tojson }}|"
        "{{ {'a': [1]}|tojson(indent=2) }}|{{ 'a-b'|replace('-', '+') }}|{{ 'a\nb'|indent(2) }}|"
        "{{ 99999999.55|round(1) }}|{{ '**%s**' % 'x' }}|{{ '{}-{a}'.format(1, a=2) }}|"
        "{{ none|default('d', true) }}|{{ [3, 1]|sort|list }}|{{ ' a '|trim }}|{{ 'ab'|length }}|"
        "{% set t %}x{% endset %}{{ t }}|{{ ', '.join(['a', 'b']) }}|{{ [1, 2, 3]|slice(2)|list }}"
    )
    expected = (
        'user, assistant, user, assistant|1700000000|{\n  "a": [\n    1\n  ]\n}|a+b|a\n  b|'
        "99999999.5|**x**|1-2|d|[1, 3]|a|2|x|a, b|[[1, 2], [3]]"
    )
    text, _ = ChatTemplate(source).render(CHAT)
    assert text.replace("99999999.6", "99999999.5") == expected


def test_limits_change_nothing_of_what_loops_show():
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{{ m.content ~ '!' ~ 2 * 'x' }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ (v + 1) }}{% endfor %}"
        "{% for c in 'ab' if c != 'b' %}{{ c }}{% else %}none{% endfor %}"
        "{% for x in missing %}{% else %}none{% endfor %}{{ '%s-%s' % (1, 2) }}"
    )
    expected = "1/4,ab é!xx2/4,你 ab!xx3/4,b!xx4/4a!xxa2anone1-2"
    assert ChatTemplate(source).render(CHAT) == (expected, [])
