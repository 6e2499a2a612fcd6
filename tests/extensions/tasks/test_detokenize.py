"""Texts that were cut into words are put together as they were written."""

from problems import problem

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.zeroshot import detokenizer_of

WIKI = """ = Title = \n
 = = Life ( early ) = = \n
 = = = Works = = = \n
 = = = = Notes = = = = \n
 Robert 's role , in 1 @,@ 000 well @-@ known plays at 2 @.@ 5 ° C ; see [ 1 ] or { a } . Why ? No ! \n
 He printed : " It is " . The players ' goals in N games
"""
WRITTEN = """ = Title =
\n== Life (early) ==
\n=== Works ===
\n==== Notes ====
\nRobert's role, in 1,000 well-known plays at 2.5°C; see [1] or {a}. Why? No!
\nHe printed: "It is". The players' goals in 1 games
"""


def test_wikitext():
    assert detokenizer_of("data/wiki.test.tokens")(WIKI) == WRITTEN


def test_quoted_words_of_wikitext():
    assert detokenizer_of("wiki")("We say ' no ' and { so } .") == "We say 'no' and {so} ."


def test_penn_treebank():
    cut = "the company 's shares did n't fall \n but rose N times to $ N or # N tons"
    assert (
        detokenizer_of("ptb.test.txt")(cut)
        == "the company's shares didn't fall\nbut rose1 times to $1 or #1 tons"
    )


def test_a_text_that_was_never_cut_stays():
    assert detokenizer_of("lambada_test.txt")(WIKI) == WIKI


def test_another_corpus_is_refused():
    with problem("other.txt … wiki, ptb", WrongDataError):
        detokenizer_of("other.txt")
