"""Which tokenizer, and how large its vocabulary becomes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer, as the user asked for it."""

    tokenizer_type: str | None = None
    """How text becomes tokens: BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer,
    PretrainedFromHF (or HuggingFaceTokenizer), SentencePieceTokenizer (or
    GPTSentencePieceTokenizer), Llama2Tokenizer, TikTokenizer or NullTokenizer. Default in GPT
    training: GPT2BPETokenizer."""

    vocab_file: Annotated[str | None, Spelling("--vocab-file", ("--vocab",))] = None
    """Vocabulary. GPT2BPETokenizer: a JSON object, token to id. BertWordPiece: one token a line.
    TikTokenizer: as --tokenizer-model."""

    merge_file: str | None = None
    """Merges of GPT2BPETokenizer: one pair a line, the most frequent first."""

    tokenizer_name_or_path: str | None = None
    """Tokenizer of PretrainedFromHF: a directory, or a name on the Hugging Face hub."""

    tokenizer_model: str | None = None
    """Model file of SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer (.model),
    or of TikTokenizer (.tiktoken, or Megatron-LM's .json); the directory of HuggingFaceTokenizer, or
    its name on the Hugging Face hub."""

    tokenizer_sentencepiece_legacy: bool = False
    """Tokens as Megatron-LM made them until 2025: SentencePieceTokenizer adds <CLS>, <SEP>, <EOD>
    and <MASK> to the model and ends documents with <EOD>; Llama2Tokenizer begins each text with
    bos. Without it both write the model's own tokens, and eos ends a document."""

    tokenizer_kwargs: list[str] | None = None
    """Names and values by turns, such as pad_token <pad>, given to transformers when it loads the
    tokenizer of PretrainedFromHF; true, false and whole numbers are not text."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the special tokens that the tokenizer of PretrainedFromHF adds to each text."""

    vocab_size: int | None = None
    """NullTokenizer: texts are numbers from 0 to this, which is the end of a document. TikTokenizer
    of a .json file: ids in all, special tokens included (default: 131072)."""

    vocab_extra_ids: int = 0
    """Number of tokens <extra_id_0>, <extra_id_1> and so on to add to the vocabulary."""

    tiktoken_pattern: Literal["v1", "v2", "r50k", "cl100k", "o200k"] | None = None
    """How TikTokenizer cuts words; the file's name says it for OpenAI's encodings."""

    tiktoken_num_special_tokens: int | None = None
    """Ids that TikTokenizer of a .json file keeps for special tokens, before all others (default:
    1000)."""

    tiktoken_special_tokens: Annotated[
        list[str] | None, Spelling("--tiktoken-special-tokens", ("--special-tokens",))
    ] = None
    """Special tokens of TikTokenizer: the first ids of a .json file, <unk> <s> </s> when not said;
    the ids after the last of a .tiktoken file."""

    tokenizer_backend: Literal["auto", "fast", "reference"] = "auto"
    """Which library encodes byte-level BPE: fast is gigatoken, or an error where it does not give
    the ids of the reference; auto then takes the reference and says so."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-model-parallel size."""

    pad_vocab_size_to: int | None = None
    """Rows of the padded vocabulary, so that they do not depend on the layout; rounded up to a
    multiple of the tensor-model-parallel size."""

    true_vocab_size: int | None = None
    """Rows of the token table that are weights of the network; all others are padding. Default: the
    vocabulary size of the tokenizer. Models of transformers may have more rows than their tokenizer
    has tokens."""

    padded_vocab_in_softmax: Annotated[
        bool | None, Spelling("--padded-vocab-in-softmax", with_truth=True)
    ] = None
    """Let the padded vocabulary columns take part in the softmax of the training loss, as in
    Megatron-LM. Default: as in the run that is continued; in a new run they are left out, and the
    loss does not depend on the padding."""
