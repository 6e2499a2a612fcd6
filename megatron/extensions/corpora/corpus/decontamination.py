"""Distributed decontamination of a corpus: evaluations' n-grams counted, then cut out if they are rare."""

from collections import Counter
from collections.abc import Sequence

from megatron.extensions.corpora.cleaning.ngrams import (
    CountNgrams,
    Cut,
    CutDocuments,
    CutRules,
    NgramSet,
)
from megatron.extensions.corpora.cleaning.records import TEXT_KEY, Line, batches, new_files
from megatron.extensions.corpora.corpus.deduplication import unique_lines
from megatron.extensions.corpora.corpus.spec import CorpusSpec, read_counts, write_counts


def count_ngrams(spec: CorpusSpec, task: int) -> None:
    """Count the n-grams of the evaluations in the documents that stay."""
    count = CountNgrams(NgramSet(spec.evaluation_ngrams), TEXT_KEY)
    found: Counter[str] = Counter()
    documents = 0
    for batch in batches(unique_lines(spec, task)):
        found += count(batch)
        documents += len(batch)
    write_counts(spec, "ngrams", task, {"documents": documents, "ngrams": found})


def clean_documents(spec: CorpusSpec, task: int) -> None:
    """Write the documents that stay, without the texts of evaluations."""
    counts: Counter[str] = Counter({"with n-grams": 0, "dropped with n-grams": 0, "unique": 0})
    lines = batches(unique_lines(spec, task))
    with new_files(spec.file("cleaned", task, "jsonl")) as (output,):
        cut, first = _cutter(spec, task) if spec.evaluations else (_keep, 0)
        for batch in lines:
            for result in cut((first + counts["unique"], batch)):
                counts["with n-grams"] += result.was_cut
                counts["dropped with n-grams"] += not result.pieces
                for piece in result.pieces:
                    output.write(piece)
            counts["unique"] += len(batch)
    counts["documents"] = output.lines
    write_counts(spec, "cleaned", task, counts)


def _keep(numbered: tuple[int, Sequence[Line]]) -> list[Cut]:
    return [Cut((line.raw,)) for line in numbered[1]]


def _cutter(spec: CorpusSpec, task: int) -> tuple[CutDocuments, int]:
    """Return the function that cuts the rare n-grams, and the first document number of `task`."""
    counted = [read_counts(spec, "ngrams", each) for each in range(spec.tasks)]
    found: Counter[str] = Counter()
    for counts in counted:
        found.update(counts["ngrams"])
    rare = CutRules().rare(spec.evaluation_ngrams, found)
    prefix = "-".join(dict.fromkeys(name for name, _ in spec.evaluations))
    cut = CutDocuments(NgramSet(rare), TEXT_KEY, prefix)
    return cut, sum(counts["documents"] for counts in counted[:task])
