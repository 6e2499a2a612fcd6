"""Preprocessing of a few documents, and their tokens read back."""

import json
import os
import signal

from bytes_tokenizer import BytesTokenizer

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.token_files.indexed_dataset import IndexedDataset


class Bytes(BytesTokenizer):
    """Bytes, with texts that kill the process or have no tokens."""

    def encode(self, text):
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "refuse":
            raise DataError("no tokens for this text")
        return super().encode(text)


def write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def conversion(tmp_path, inputs, **options):
    options = {"make_encoder": Bytes, "output_prefix": str(tmp_path / "out")} | options
    return PreprocessSpec(inputs=tuple(inputs), **options)


def run(tmp_path, inputs, **options):
    return preprocess(conversion(tmp_path, inputs, **options))


def read_tokens(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def read_texts(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset[i].astype("u1")).decode() for i in range(len(dataset))]


def outputs(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))
