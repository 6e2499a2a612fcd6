"""Texts cut into sentences by NLTK's Punkt: its data for a language, or a model of the corpus."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from megatron.common.errors import DataError, needed_for

log = logging.getLogger(__name__)

LANGUAGES = (
    *("czech", "danish", "dutch", "english", "estonian", "finnish", "french", "german", "greek"),
    *("italian", "malayalam", "norwegian", "polish", "portuguese", "russian", "slovene"),
    *("spanish", "swedish", "turkish"),
)
"""Languages of NLTK's punkt_tab data. A custom folder may have more."""

_TRAINING_CHARACTERS = 10_000_000  # of the corpus, to train a model on
_SLICE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class SentenceSplitter:
    """Cuts a text into sentences.

    Args:
        lang: language of NLTK's data.
        keep_newlines: leave each sentence the white space that follows it.
        parameters: a model trained on the corpus; None: NLTK's data.
        slice_characters: a longer text is cut first: Punkt's time grows faster than a text.
    """

    lang: str
    keep_newlines: bool
    parameters: Any = None
    slice_characters: int = _SLICE_CHARACTERS

    @property
    def model(self) -> str:
        """Identity of the model: equal for equal models only."""
        model = self._punkt._params
        parts = (model.abbrev_types, model.collocations, model.sent_starters)
        content = [*map(sorted, parts), sorted(model.ortho_context.items())]
        origin = "trained on the input" if self.parameters else f"NLTK data for {self.lang}"
        return f"{origin}, {sha256(repr(content).encode()).hexdigest()[:16]}"

    def __call__(self, text: str) -> list[str]:
        """Return the sentences of `text`, in order."""
        return [
            sentence
            for start in range(0, len(text), self.slice_characters)
            for sentence in self._sentences(text[start : start + self.slice_characters])
        ]

    def _sentences(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        if not self.keep_newlines:
            return [text[start:end] for start, end in spans]
        starts = [0, *(start for start, _ in spans[1:])]
        ends = [*starts[1:], len(text)]
        return [text[start:end] for start, end in zip(starts, ends, strict=True)]

    @cached_property
    def _punkt(self) -> Any:
        punkt = _import_punkt()
        if self.parameters is None:
            return punkt.PunktTokenizer(self.lang)
        return punkt.PunktSentenceTokenizer(self.parameters)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loaded model: each process loads it on first use."""
        return {name: value for name, value in vars(self).items() if name != "_punkt"}


def build_splitter(lang: str, keep_newlines: bool, texts: Iterator[str]) -> SentenceSplitter:
    """Return a splitter by NLTK's data for `lang` or, without them, one trained on `texts`.

    Raises:
        DataError: nltk is not installed or has no such language, or there are neither data nor
            texts.
    """
    punkt = _import_punkt()
    try:
        punkt.PunktTokenizer(lang)
    except (LookupError, OSError) as error:
        if lang not in LANGUAGES:
            raise DataError(
                f"--lang {lang}: NLTK has no such data, but has them for {', '.join(LANGUAGES)}; "
                "for another language set NLTK_DATA to the folder of your own data or, where no data "
                "are installed, leave --lang out, so that a model is trained on the input"
            ) from error
    else:
        return SentenceSplitter(lang, keep_newlines)
    trainer = punkt.PunktTrainer()
    trainer.INCLUDE_ALL_COLLOCS = True
    characters = 0
    for text in texts:
        trainer.train(text[:_SLICE_CHARACTERS], finalize=False)
        characters += len(text)
        if characters >= _TRAINING_CHARACTERS:
            break
    if not characters:
        raise DataError(
            f"--split-sentences needs NLTK's punkt_tab data for --lang {lang}: they are not "
            "installed (python -m nltk.downloader punkt_tab; NLTK_DATA is their folder), and "
            "no file of --input has a text to train a model on"
        )
    log.info(
        "NLTK's punkt_tab data for --lang %s are not installed: sentences are split by a model "
        "trained on the first %d characters of the input",
        lang,
        characters,
    )
    trainer.finalize_training()
    return SentenceSplitter(lang, keep_newlines, trainer.get_params())


def _import_punkt() -> Any:
    with needed_for("--split-sentences", "nltk"):
        from nltk.tokenize import punkt
    return punkt
