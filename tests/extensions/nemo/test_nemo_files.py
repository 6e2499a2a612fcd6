"""NeMo's archives and mp_autoresume checkpoints: written, read, merged from ranks, refused."""

import io
import json
import tarfile

import pytest
import torch
import yaml
from checkpoints import random_weights, write_checkpoint
from foreign_files import split
from problems import problem
from tiny import tiny_config

from megatron.checkpointing.conversion.export import Export, ExportOptions, export
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.megatron_lm.convert import native_manifest, native_weights
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.config.config import parse_conversion
from megatron.config.network.model_spec import flat
from megatron.config.plan.plan import plan
from megatron.config.tools.checkpoint_tools import ConversionConfig
from megatron.extensions.nemo.checkpoints import find, tokenizer_in
from megatron.extensions.tasks.flags import objective_of
from megatron.tokenizer.build import build_tokenizer

LABELS = ("O", "B-LOC", "B-PER")
TASKS = {
    "token-classification": ["--labels", *LABELS],
    "text-classification": ["--labels", "no", "yes", "--head-layers", "2"],
    "question-answering": ["--max-query-length", "2"],
}
NAMES = {"token-classification": [*LABELS], "text-classification": ["no", "yes"]}
SIZES = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "12", "--max-position-embeddings", "16"),
    *("--tokenizer-type", "BertWordPieceCase", "--gelu", "erf"),
]
VOCAB = 16  # with [BOS] and [EOS]


def job_of(tmp_path, task, *more):
    """Write a random network; return the job of its export and the weights by name."""
    vocabulary = tmp_path / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *"abcdefghi"]) + "\n")
    words = [*SIZES, *(more or TASKS[task]), "--vocab-file", str(vocabulary), "--task", task]
    words += ["--train-data", "none"]
    config, objective = tiny_config(*words, without=("--data-path",)), objective_of(task)
    spec = plan(config, world_size=4, vocab_size=VOCAB, device="cpu", objective=objective).model
    weights = random_weights(spec)
    folder = write_checkpoint(
        tmp_path / "own",
        weights,
        *words,
        vocab_size=VOCAB,
        objective=objective,
        without=("--data-path",),
    )
    arguments = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(vocabulary)}
    job = Export(
        source=folder,
        manifest=read_manifest(folder),
        tokenizer=build_tokenizer(**arguments),
        tokenizer_arguments=arguments,
        options=ExportOptions(),
    )
    return job, weights


def written(tmp_path, task):
    """Write a random network and its archive; return the archive and the weights by name."""
    job, weights = job_of(tmp_path, task)
    assert str(export(job, tmp_path / "nemo", "nemo")) == f"{task}.nemo in fp32"
    return tmp_path / "nemo" / f"{task}.nemo", weights


def read(path, **how):
    """Return the network of files of NeMo's and its weights, as a conversion makes them."""
    found = find(path, **how)
    own = ["--model-type=BERT", "--load-dir=a", "--save-dir=b"]
    config = parse_conversion(found.values, own, ConversionConfig).config
    spec = native_manifest(found, config, vocab_size=VOCAB).spec
    parameters = native_weights(found, spec).parameters
    return found, flat(spec), {name: p.weight.all() for name, p in parameters.items()}


def require_equal(found, weights):
    assert {*found} == {*weights}
    for name, weight in found.items():
        assert torch.equal(weight, weights[name][: len(weight)]), name


@pytest.mark.parametrize("task", TASKS)
def test_an_archive_holds_the_network(task, tmp_path):
    archive, weights = written(tmp_path, task)
    found, model, own = read(archive)
    require_equal(own, weights)
    assert found.objective == objective_of(task)
    labels = NAMES.get(task, [])
    assert (list(model["labels"]), model["activation"]) == (labels, "gelu_erf")
    assert model["first_token_head"] == (task == "text-classification")
    kind, vocabulary = tokenizer_in(archive)
    assert kind == "BertWordPieceCase"
    assert vocabulary.decode().split()[:14] == (tmp_path / "vocab.txt").read_text().split()
    with tarfile.open(archive, "r:gz") as tar:
        files = {*tar.getnames()}
        assert files - {"class_labels.csv"} == {
            *("mp_rank_00", "mp_rank_00/model_weights.ckpt", "model_config.yaml"),
            *("megatron-bert-cased_encoder_config.json", "megatron_checkpoint_version.json"),
            *("tokenizer_vocab_dict.json", "tokenizer.vocab_file"),
        }
        config = yaml.safe_load(tar.extractfile("model_config.yaml"))
        version = json.load(tar.extractfile("megatron_checkpoint_version.json"))
    assert version == {"checkpoint_version": 3}
    assert config["language_model"]["config"]["hidden_size"] == 16
    assert config.get("label_ids", {}) == {label: i for i, label in enumerate(labels)}
    assert ("class_labels.csv" in files) == (task == "text-classification")


@pytest.mark.parametrize("task", TASKS)
def test_a_resumable_checkpoint_holds_the_network(task, tmp_path):
    job, weights = job_of(tmp_path, task)
    said = str(export(job, tmp_path / "nemo", "nemo-autoresume"))
    assert said == "mp_rank_00/mp_autoresume-last.ckpt in fp32"
    found, model, own = read(tmp_path / "nemo")  # which names its heads and labels
    require_equal(own, weights)
    assert found.objective == objective_of(task)
    assert list(model["labels"]) == NAMES.get(task, [])
    file = tmp_path / "nemo" / "mp_rank_00" / "mp_autoresume-last.ckpt"
    content = torch.load(file, weights_only=True)
    assert content["checkpoint_version"] == 3
    assert {"epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers"} <= {*content}


def test_the_names_in_nemo_of_a_head_on_the_first_token(tmp_path):
    job, _ = job_of(tmp_path, "text-classification")
    export(job, tmp_path / "nemo", "nemo-autoresume")
    content = torch.load(tmp_path / "nemo" / "mp_rank_00" / "mp_autoresume-last.ckpt")
    head = {n: [*w.shape] for n, w in content["state_dict"].items() if n.startswith("classifier.")}
    assert head == {
        "classifier.mlp.layer0.weight": [16, 16],
        "classifier.mlp.layer0.bias": [16],
        "classifier.mlp.layer2.weight": [2, 16],
        "classifier.mlp.layer2.bias": [2],
    }


def test_a_pooler_is_no_head_of_nemos(tmp_path):
    job, _ = job_of(tmp_path, "text-classification", "--labels", "no", "yes")
    with problem("--head-layers 2", WrongCheckpointError):
        export(job, tmp_path / "nemo", "nemo")


def ranks_of(archive, folder, name):
    """Write two ranks of an archive's network as Lightning saves them; return the folder."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    weights = torch.load(folder / "unpacked" / "mp_rank_00" / "model_weights.ckpt")
    for rank in range(2):
        state = {
            # Rows of queries, keys and values are in the order of the heads.
            key: weight.chunk(2)[rank] if "query_key_value" in key else split(key, weight, 2)[rank]
            for key, weight in weights.items()
        }
        file = folder / f"mp_rank_{rank:02d}" / name
        file.parent.mkdir()
        torch.save({"state_dict": state, "epoch": 1, "checkpoint_version": 3}, file)
    return folder


@pytest.mark.parametrize(
    "name", ["mp_autoresume-last.ckpt", "mp_autoresume---val_loss=0.35-epoch=0.ckpt"]
)
def test_ranks_of_a_resumable_run_are_merged(name, tmp_path):
    archive, weights = written(tmp_path, "token-classification")
    folder = ranks_of(archive, tmp_path, name)
    _, model, own = read(folder, heads=4)
    require_equal(own, weights)
    assert list(model["labels"]) == ["0", "1", "2"]  # these files have no names
    _, model, _ = read(folder, heads=4, task="text-classification")  # that of the script
    assert model["first_token_head"]


class _Node:
    """A part of a configuration of omegaconf's."""

    def __init__(self, **values):
        vars(self).update(values)


def node_of(value, kind=_Node):
    if isinstance(value, dict):
        return kind(_content={key: node_of(each, kind) for key, each in value.items()})
    return kind(_val=value)


def test_names_in_a_configuration_of_omegaconfs_are_read(tmp_path, modules):
    job, weights = job_of(tmp_path, "token-classification")
    export(job, tmp_path / "nemo", "nemo-autoresume")
    file = tmp_path / "nemo" / "mp_rank_00" / "mp_autoresume-last.ckpt"
    content = torch.load(file)
    kind = type("DictConfig", (_Node,), {"__module__": "omegaconf"})
    module = modules("omegaconf", DictConfig=kind)
    config = node_of(content["hyper_parameters"]["cfg"], module.DictConfig)
    torch.save(content | {"hyper_parameters": {"cfg": config}}, file)
    modules("omegaconf")
    _, model, own = read(tmp_path / "nemo")
    require_equal(own, weights)
    assert list(model["labels"]) == [*LABELS]


def test_files_of_something_else_are_refused(tmp_path):
    (tmp_path / "a.nemo").write_bytes(b"\x1f\x8b")
    with problem("a.nemo … archive", WrongCheckpointError):
        find(tmp_path / "a.nemo")
    torch.save({"state_dict": {"encoder.weight": torch.ones(2)}}, tmp_path / "mp_autoresume.ckpt")
    with problem("mp_autoresume.ckpt … no BERT … head", WrongCheckpointError):
        find(tmp_path / "mp_autoresume.ckpt")
    (tmp_path / "mp_rank_00").mkdir()
    with problem("model_weights.ckpt", WrongCheckpointError):
        find(tmp_path)


def _members(archive, changes):
    """Write the members of an archive again, with other contents; None leaves one out."""
    with tarfile.open(archive) as tar:
        kept = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    for end, content in changes.items():
        names = [name for name in kept if name.endswith(end)] or [end]
        for name in names:
            kept[name] = content
    with tarfile.open(archive, "w") as tar:
        for name, content in kept.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


_BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("end", "content"),
    [
        ("model_config.yaml", _BOMB),
        ("model_config.yaml", "[1, 2]"),
        ("model_config.yaml", "3"),
        ("model_config.yaml", "a: [" * 3000),
        ("model_config.yaml", "class_labels: [a]"),
        ("model_config.yaml", "language_model: [a]"),
        ("model_config.yaml", "language_model: {config: 3}"),
        ("model_config.yaml", "label_ids: [a, b]"),
        ("model_config.yaml", "label_ids: {a: 1, b: x}"),
        ("model_config.yaml", "\ud800"),
        ("encoder_config.json", "[" * 100_000),
        ("encoder_config.json", "3"),
        ("megatron_checkpoint_version.json", '{"checkpoint_version": "x"}'),
        ("megatron_checkpoint_version.json", "[[1, 2, 3]]"),
    ],
    ids=lambda value: value[:30],
)
def test_small_files_with_other_content_are_one_sentence(tmp_path, end, content):
    archive, _ = written(tmp_path, "token-classification")
    _members(archive, {end: content.encode("utf-8", "surrogatepass")})
    for reads in (find, tokenizer_in):
        try:
            reads(archive)
        except CheckpointError as error:
            assert "\n" not in str(error).strip() or "YAML" in str(error) or "line" in str(error)
        else:
            assert reads is tokenizer_in or "config" in content or "label" in content


@pytest.mark.parametrize("name", ["**", "", "/etc/passwd", "../*", "nemo:**", "[", ".."])
def test_the_file_of_labels_is_a_name_and_no_pattern(tmp_path, name):
    archive, _ = written(tmp_path, "token-classification")
    content = yaml.safe_dump({"class_labels": {"class_labels_file": name}}).encode()
    _members(archive, {"model_config.yaml": content})
    assert find(archive, task="token-classification").values["labels"] == ["0", "1", "2"]


def test_an_archive_that_does_not_fit_is_not_unpacked(tmp_path, disk, monkeypatch):
    archive, _ = written(tmp_path, "token-classification")
    disk(free=1000, block=1)
    monkeypatch.setattr(
        tarfile.TarFile, "extractall", lambda *args, **kwargs: pytest.fail("writes")
    )
    with problem("1,000 … free … TMPDIR", WrongCheckpointError):
        find(archive)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        3,
        {"state_dict": 3},
        {"state_dict": {"classifier.mlp.layer0.weight": 3}},
        {"state_dict": {f"bert_model.language_model.{i}": 3 for i in range(9)}},
    ],
    ids=str,
)
def test_weights_of_other_content_are_one_sentence(tmp_path, content):
    torch.save(content, tmp_path / "mp_autoresume.ckpt")
    with problem("mp_autoresume", CheckpointError):
        find(tmp_path / "mp_autoresume.ckpt")
