"""Each tool as it is run: by its documented words, to its files and its exit code."""

import json
from pathlib import Path

import pytest
from texts import FRENCH, english

TOOLS = Path(__file__).parents[3] / "tools" / "openwebtext"
QUESTION = " ".join(f"secret{i}" for i in range(13))


def ok(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blacklist_urls_keeps_the_order_of_input(tool, tmp_path):
    folder = tmp_path / "urls"
    folder.mkdir()
    kept = [f"http://example{i * 7919 % 100}.com/page" for i in range(50)]
    (folder / "b.txt").write_text("\n".join(["http://youtube.com/x", kept[0], *kept[25:], "short"]))
    (folder / "a.txt").write_text("\n".join([*kept[:25], "http://a.org/x.7z", "", "not a page"]))
    assert ok(tool("blacklist_urls.py", "urls", "out.txt")) == (
        "out.txt: URLs: 50 | too short: 1 | malformed: 1 | blacklisted domain: 1 | "
        "blacklisted extension: 1 | duplicate: 1\n"
    )
    assert (tmp_path / "out.txt").read_text().splitlines() == kept


def test_cleanup_dataset(tool, write, read):
    texts = [english(0), FRENCH, "A short text of the house.", english(1) + " It was schÃ¶n."]
    write("in.jsonl", [{"text": text, "url": str(i)} for i, text in enumerate(texts)])
    done = tool("cleanup_dataset.py", "in.jsonl", "out.jsonl")
    assert ok(done) == (
        "out.jsonl: documents: 2 | fixed: 1 | dropped, not English: 1 | dropped, small: 1\n"
    )
    assert "without --vocab-file and --merge-file" in done.stderr
    assert read("out.jsonl") == [
        {"text": texts[0], "url": "0"},
        {"text": english(1) + " It was schön.", "url": "3"},
    ]


def test_cleanup_dataset_counts_tokens_exactly_with_a_vocabulary(tool, write, tmp_path):
    from tokenizers import pre_tokenizers

    write("in.jsonl", [{"text": "the house of the river and the city of light " * 3, "url": "u"}])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    words = ["cleanup_dataset.py", "in.jsonl", "out.jsonl", "--vocab-file", "vocab.json"]
    done = tool(*words, "--merge-file", "merges.txt")
    assert (ok(done).split(" | ")[0], done.stderr) == ("out.jsonl: documents: 1", "")
    assert "documents: 0" in ok(tool(*words[:3]))
    assert tool(*words).stderr == (
        "error: --vocab-file and --merge-file go together; give both or none\n"
    )


def test_cleanup_fix_dataset(tool, write, read, tmp_path):
    (tmp_path / "out").mkdir()
    texts = [english(0), "tiny", english(1) + "  schÃ¶n"]
    write("one.json", [{"text": text} for text in texts])
    write("two.json", [{"text": text} for text in texts[:1]])
    done = tool(
        "cleanup_fix_dataset.py", "--input-files", "one.json", "two.json", "--tasks",
        "remove_512", "ftfy_fix_text", "general_cleaning", "--output-path", "out",
        "--log-interval", "1",
    )  # fmt: skip
    assert ok(done).splitlines() == [
        "out/one_cleaned.json: documents: 2 | filtered: 1 | remove_512: 1 | ftfy_fix_text: 1 | "
        "general_cleaning: 1",
        "out/two_cleaned.json: documents: 1 | filtered: 0 | remove_512: 0 | ftfy_fix_text: 0 | "
        "general_cleaning: 0",
    ]
    assert done.stderr.count("documents: ") == 4
    assert [record["text"] for record in read("out/one_cleaned.json")] == [
        texts[0],
        english(1) + " schön",
    ]
    assert read("out/one_filtered.json") == [{"text": "tiny"}]


@pytest.fixture
def corpus(write):
    records = [{"url": f"http://a.org/{i}", "text": english(i)} for i in range(8)]
    records += [{"url": "http://b.org/2", "text": english(2) + " More."}]
    write("data.jsonl", records)
    return records


def test_from_documents_to_documents_without_duplicates(tool, corpus, read):
    ok(
        tool(
            "find_duplicates.py", "--inputs", "data.jsonl", "url", "--output", "pairs.jsonl",
            "--seed", "7", "--jaccard", "union", "--heuristic-iter", "1", "--num-bands", "10",
            "--num-seeds", "100", "--save-fingerprints", "saved.npz",
        )
    )  # fmt: skip
    ((main, ((other, similarity),)),) = [
        (main, [*others[0].items()]) for main, others in read("pairs.jsonl")[0].items()
    ]
    assert (main, other) == ("http://a.org/2", "http://b.org/2")
    assert 0.9 < similarity < 1
    again = ("--load-fingerprints", "saved.npz", "--output", "again.jsonl", "--seed", "7")
    ok(tool("find_duplicates.py", *again, "--jaccard-parallel", "--heuristic-iter", "-1"))
    assert read("again.jsonl") == read("pairs.jsonl")

    ok(tool("group_duplicate_url.py", "pairs.jsonl", "groups.jsonl"))
    assert read("groups.jsonl") == [{"0": ["http://a.org/2", "http://b.org/2"]}]
    stdout = ok(tool("remove_group_duplicates.py", "groups.jsonl", "data.jsonl", "out.jsonl"))
    assert stdout == (
        f"out.jsonl: documents: 8 | removed: 1 | characters removed: {len(corpus[8]['text'])}\n"
    )
    assert read("out.jsonl") == corpus[:8]


def test_the_threshold_itself_does_not_join(tool, write, read):
    write("pairs.jsonl", [{"a": [{"b": 0.7}, {"c": 0.71}]}, {"d": [{"c": 0.95}]}])
    assert "groups: 1 | URLs: 3" in ok(tool("group_duplicate_url.py", "pairs.jsonl", "out.jsonl"))
    assert read("out.jsonl") == [{"0": ["a", "c", "d"]}]
    ok(tool("group_duplicate_url.py", "pairs.jsonl", "out.jsonl", "0.9"))
    assert read("out.jsonl") == [{"0": ["d", "c"]}]


def test_a_second_document_of_a_kept_name_goes_too(tool, write, read):
    write("groups.jsonl", [{"0": ["a"]}])
    write("data.jsonl", [{"url": url, "text": str(i)} for i, url in enumerate("aba")])
    ok(tool("remove_group_duplicates.py", "groups.jsonl", "data.jsonl", "out.jsonl"))
    assert [record["text"] for record in read("out.jsonl")] == ["0", "1"]


def test_filter_ngrams(tool, write, read):
    common = " ".join(f"common{i}" for i in range(13))
    texts = [english(i) + f" So it is: {common}." for i in range(10)]
    texts[4] = f"{english(4, 20)} {QUESTION}. {english(14, 20)} {common}."
    records = [{"id": i, "body": text} for i, text in enumerate(texts)]
    write("data.jsonl", records)
    write("lambada.jsonl", [{"text": QUESTION.upper()}, {"text": common}])
    write("race.jsonl", [{"article": "too short to count"}])
    done = tool(
        "filter_ngrams.py", "--tasks", "lambada", "race", "--lambada-path", "lambada.jsonl",
        "--task-files", "race", "race.jsonl", "--dedup-dataset", "data.jsonl", "body",
        "--output", "out.jsonl", "--num-threads", "40", "--max-ngram-size", "13",
        "--min-ngram-size", "8", "--filter-text-char-len", "200", "--key-threshold", "10",
        "--splits-count", "10", "--remove-char-each-side", "200", "--save-dictionary", "rare.json",
    )  # fmt: skip
    assert "n-grams to take out: 1\n" in ok(done)
    found = read("out.jsonl")
    assert [record for record in found if record["id"] != 4] == records[:4] + records[5:]
    pieces = [record for record in found if record["id"] == 4]
    assert [piece["split_id"] for piece in pieces] == [
        "lambada-race-0000000004-0000",
        "lambada-race-0000000004-0001",
    ]
    assert not any("secret" in piece["body"] for piece in pieces)
    assert common in pieces[1]["body"]

    again = ("--load-dictionary", "rare.json", "--dedup-dataset", "data.jsonl", "body")
    ok(tool("filter_ngrams.py", *again, "--output", "again.jsonl"))
    assert read("again.jsonl") == found


def test_merge_jsons_does_not_read_its_own_output(tool, write, tmp_path):
    (tmp_path / "b.json").write_text('{"n": 2}\n\n{"n": 3}')
    (tmp_path / "a.json").write_text('{"n":   1}\n')
    for _ in range(2):
        assert ok(tool("merge_jsons.py")) == "merged_output.json: files: 2 | documents: 3\n"
        assert (tmp_path / "merged_output.json").read_text() == '{"n":   1}\n{"n": 2}\n{"n": 3}\n'
    ok(tool("merge_jsons.py", "--json_path", ".", "--output_file", "other.jsonl"))
    assert (tmp_path / "other.jsonl").read_text().count("\n") == 6


def test_add_id(tool, write, read):
    write("in.jsonl", [{"text": "é"}, {"text": "b", "adlr_id": "old"}])
    words = ("--input-file", "in.jsonl", "--output-file", "out.jsonl", "--id-prefix", "web")
    done = tool("add_id.py", *words, "--log-interval", "2")
    assert ok(done) == "out.jsonl: documents: 2\n"
    assert done.stderr.startswith("documents: 2 | ")
    assert read("out.jsonl") == [
        {"text": "é", "adlr_id": "web-0000000000"},
        {"text": "b", "adlr_id": "web-0000000001"},
    ]


BAD = "bad.json, line 2: not JSON: '{\"text\":'"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["cleanup_dataset.py", "bad.json", "out"], 2, BAD),
        (["cleanup_fix_dataset.py", "--input-files", "bad.json", "--tasks", "ftfy_fix_text",
          "--output-path", "."], 2, BAD),
        (["find_duplicates.py", "--inputs", "bad.json", "url", "--output", "out"], 2, BAD),
        (["group_duplicate_url.py", "bad.json", "out"], 2, "bad.json, line 1: "),
        (["remove_group_duplicates.py", "groups.jsonl", "bad.json", "out"], 2, BAD),
        (["filter_ngrams.py", "--tasks", "lambada", "--lambada-path", "groups.jsonl",
          "--dedup-dataset", "bad.json", "text", "--output", "out"], 2, "no text under key 'text'"),
        (["merge_jsons.py", "--output_file", "out"], 2, BAD),
        (["add_id.py", "--input-file", "bad.json", "--output-file", "out", "--id-prefix", "x"],
         2, BAD),
        (["cleanup_dataset.py", "none", "out"], 2, "cannot read none: No such file"),
        (["cleanup_dataset.py", "bad.json", "no/out"], 2, "cannot write no/out"),
        (["blacklist_urls.py", ".", "out"], 2, "no *.txt file in ."),
        (["group_duplicate_url.py", "bad.json", "out", "7"], 2, "threshold 7.0: give a number"),
        (["cleanup_dataset.py", "bad.json", "bad.json"], 2, "would be read and replaced"),
        (["merge_jsons.py", "--json_path", "no"], 2, "no *.json file to merge"),
        (["cleanup_fix_dataset.py", "--input-files", "a/x.json", "b/x.json", "--tasks", "shout",
          "--output-path", "no", "--log-interval", "0"], 2,
         ["shout: no such task", "are named x", "--log-interval 0", "no is not a directory"]),
        (["find_duplicates.py", "--inputs", "bad.json", "--num-seeds", "99", "--seed", "-1",
          "--heuristic-iter", "0"], 2,
         ["give a key after each file", "nothing to write", "99 is not a multiple",
          "--seed -1", "--heuristic-iter 0"]),
        (["find_duplicates.py", "--output", "out"], 2, "no documents: give --inputs"),
        (["filter_ngrams.py", "--dedup-dataset", "bad.json", "--min-ngram-size", "14",
          "--key-threshold", "0", "--task-files", "race"], 2,
         ["give a file and a key", "--min-ngram-size 14", "--key-threshold 0", "no tasks",
          "nothing to write", "give a file after each task"]),
        (["filter_ngrams.py", "--dedup-dataset", "bad.json", "text", "--output", "out",
          "--load-dictionary", "groups.jsonl"], 2, "is no file that --save-dictionary wrote"),
        (["filter_ngrams.py", "--dedup-dataset", "bad.json", "text", "--output", "out",
          "--tasks", "glue"], 2, "glue: no such task; choose from lambada, squad"),
        (["add_id.py", "--input-file", "bad.json", "--output-file", "out", "--id-prefix", "x",
          "--log-interval", "0"], 2, "--log-interval 0: give 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_and_nothing_is_published(
    tool, write, tmp_path, words, code, message
):
    write("groups.jsonl", [{"0": ["a", "b"]}])
    (tmp_path / "bad.json").write_text('{"text": "good", "url": "u"}\n{"text": \n')
    before = set(tmp_path.iterdir())
    done = tool(*words)
    assert done.returncode == code, done.stderr
    for part in [message] if isinstance(message, str) else message:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("path", sorted(TOOLS.glob("*.py")), ids=lambda path: path.stem)
def test_help_describes_what_the_tool_does(path, tool):
    assert ok(tool(path.name, "--help")).startswith("usage: ")
