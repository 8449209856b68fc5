"""Corpora and labelled texts from local files: order of texts, and errors."""

import os

import pytest

from blocksparse import BlockSparseError
from blocksparse_lab.data import corpora, reviews


def write_imdb(folder, per_class=20, unlabelled=12):
    """Write a small aclImdb, whose texts name their place."""
    for part in ("train", "test"):
        for kind, stars in (("neg", 1), ("pos", 9)):
            (folder / "aclImdb" / part / kind).mkdir(parents=True)
            for i in range(per_class):
                path = folder / "aclImdb" / part / kind / f"{i}_{stars}.txt"
                path.write_text(f"{part} {kind} {i}<br /><br />caf\u00e9 &quot;x&quot;", encoding="utf-8")
    (folder / "aclImdb" / "train" / "unsup").mkdir()
    for i in range(unlabelled):
        (folder / "aclImdb" / "train" / "unsup" / f"{i}_0.txt").write_text(f" u{i}\n&amp; ")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# -- corpora -------------------------------------------------------------------------------------------------------


def test_imdb_is_a_review_per_line_as_the_probe_gives_it(tmp_path):
    write_imdb(tmp_path)
    data = corpora.load("imdb", tmp_path)
    assert data == b"".join(b"\n u%d & " % i for i in range(12))
    assert data == b"".join(map(reviews.encode, reviews.unlabelled(tmp_path)))


@pytest.mark.parametrize("folder", ["", "text"])
def test_corpora_of_a_folder(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    write(tmp_path / folder / "wikipedia_en.txt", "Some words.")
    write(tmp_path / folder / "enwik8_prefix", "<mediawiki")
    write(tmp_path / "mine.txt", b"\xff\x00")
    assert corpora.load("wikipedia", tmp_path) == b"Some words."
    assert corpora.load("enwik8_prefix", tmp_path) == b"<mediawiki"
    assert corpora.load("mine.txt", tmp_path) == b"\xff\x00"


def test_corpora_must_be_what_their_names_say(tmp_path):
    write(tmp_path / "enwik8", "a part of it")
    with pytest.raises(BlockSparseError, match="enwik8: expected all of its 100,000,000 bytes, got 12 bytes"):
        corpora.load("enwik8", tmp_path)
    with pytest.raises(BlockSparseError, match=r"text8: expected .*text8 or .*text8, got neither"):
        corpora.load("text8", tmp_path)


def test_corpora_without_a_download_ask_for_the_folder():
    with pytest.raises(BlockSparseError, match=r"wikipedia: expected --data-dir, a folder with wikipedia_en\.txt or"):
        corpora.load("wikipedia")


@pytest.mark.parametrize("folder", [True, False])
def test_an_unknown_corpus_lists_the_known(tmp_path, folder):
    with pytest.raises(BlockSparseError, match=r"one of enwik8, text8, .*imdb, python.* got 'enwik10'"):
        corpora.load("enwik10", tmp_path if folder else None)


# -- encoding texts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", b"\n  "),
        (" a\nb ", b"\n a b "),
        ("&lt;b&gt; &amp;amp;", b"\n <b> &amp; "),
        ("one<br /><br />two", b"\n one<br /><br />two "),
        ("caf\u00e9", b"\n caf\xc3\xa9 "),
        ("\ud800", b"\n ? "),
    ],
)
def test_encode(text, expected):
    assert reviews.encode(text) == expected


# -- SST and IMDB --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "sst"])
def test_sst(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    for part in ("train", "dev", "test"):
        write(tmp_path / folder / f"{part}_binary_sent.csv", f'label,sentence\n1,"Good, {part}."\n0,Bad.\n')
    splits = reviews.load("sst", tmp_path)
    assert splits.classes == ("negative", "positive")
    assert splits.validation == reviews.Labelled(["Good, dev.", "Bad."], [1, 0])
    assert splits.test.texts[0] == "Good, test."


def test_imdb_holds_out_a_stratified_part_of_train(tmp_path):
    write_imdb(tmp_path)
    splits = reviews.load("imdb", tmp_path)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (36, 4, 40)
    for part in (splits.train, splits.validation, splits.test):
        assert 2 * sum(part.labels) == len(part)
        assert [int(" pos " in text) for text in part.texts] == part.labels
    assert {*splits.train.texts, *splits.validation.texts} == {
        f"train {kind} {i}<br /><br />caf\u00e9 &quot;x&quot;" for kind in ("neg", "pos") for i in range(20)
    }
    assert reviews.load("imdb", tmp_path / "aclImdb") == splits
    assert reviews.load("imdb", tmp_path, seed=1).validation != splits.validation


@pytest.mark.skipif("BLOCKSPARSE_TEST_DATA" not in os.environ, reason="BLOCKSPARSE_TEST_DATA, the real files, not set")
def test_the_published_files():
    folder = os.environ["BLOCKSPARSE_TEST_DATA"]
    splits = reviews.load("sst", folder)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [6920, 872, 1821]
    assert splits.validation.texts[0] == "One long string of cliches."
    splits = reviews.load("imdb", folder)
    assert [sum(part.labels) for part in (splits.train, splits.validation, splits.test)] == [11250, 1250, 12500]
    data = corpora.load("imdb", folder)
    assert data.count(b"\n") == 50_000
    assert data.endswith(b" ")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(BlockSparseError, match=r"imdb: expected .*aclImdb.*, got neither"):
        reviews.load("imdb", tmp_path)
    with pytest.raises(BlockSparseError, match=r"sst: expected .*train_binary_sent\.csv, got neither"):
        reviews.load("sst", tmp_path)
    with pytest.raises(BlockSparseError, match=r"data: expected sst, imdb or a csv file, got yelp"):
        reviews.load("yelp", tmp_path)
    write_imdb(tmp_path)
    write(tmp_path / "aclImdb" / "test" / "pos" / "3_9.txt", b"\xff\xfe")
    with pytest.raises(BlockSparseError, match=r"NUMBER_STARS\.txt in UTF-8 in .*pos, got"):
        reviews.load("imdb", tmp_path)


# -- any csv file --------------------------------------------------------------------------------------------------


def test_a_csv_file_is_split_with_both_classes_in_each_part(tmp_path):
    rows = "".join(f"{'spam' if i % 4 == 0 else 'ham'},{i}\n" for i in range(200))
    splits = reviews.load(write(tmp_path / "mail.csv", f"label,text\n{rows}"))
    assert splits.name == "mail.csv"
    assert splits.classes == ("ham", "spam")
    parts = splits.train, splits.validation, splits.test
    assert [(len(part), sum(part.labels)) for part in parts] == [(160, 40), (20, 5), (20, 5)]
    assert sorted(int(text) for part in parts for text in part.texts) == list(range(200))
    assert all([int(text) % 4 == 0 for text in part.texts] == part.labels for part in parts)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ("1 0", ("0", "1")),
        ("2 10", ("2", "10")),
        ("1 -1", ("-1", "1")),
        ("pos neg", ("neg", "pos")),
        ("Positive negative", ("negative", "Positive")),
    ],
)
def test_classes_are_in_order(tmp_path, labels, classes):
    first, second = labels.split()
    texts = f'Sentiment,id,Review\n{first},7,"two\nlines"\n\n{second},8,one\n'
    labelled, found = reviews.read_csv(write(tmp_path / "a.csv", b"\xef\xbb\xbf" + texts.encode()))
    assert found == classes
    assert labelled.texts == ["two\nlines", "one"]
    assert labelled.labels == [classes.index(first), classes.index(second)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"line 1: expected one column named text or sentence or review, got \[\]"),
        ("label,words\n1,a\n", r"line 1: expected one column named text or sentence or review, got \['label', 'words'"),
        ("text,stars\na,1\n", r"line 1: expected one column named label or sentiment"),
        ("label,text,review\n1,a,b\n", r"line 1: expected one column named text"),
        ("label,text\n", r"expected labels of two classes, got no row below the header"),
        ("label,text\n1,a\n1,b\n", r"expected labels of two classes, got only 1 down to line 3"),
        ('label,text\n1,"a\nb"\n0,c\n2,d\n', r"line 5: expected a label 1 or 0, got '2'"),
        ("label,text\n1,a\n,b\n", r"line 3: expected a text and a label, got no label"),
        ("label,text\n1,a\n0, \n", r"line 3: expected a text and a label, got no text"),
        ("label,text\n1,a\n0\n", r"line 3: expected 2 columns as in line 1, got 1"),
        ("label,text\n1,a, b\n", r"line 2: expected 2 columns as in line 1, got 3"),
        (b"label,text\n1,a\n0,\xe9\n", r"line 3: expected UTF-8, got byte 0xe9"),
        ('label,text\n1,a\n0,"b\n1,c\n0,d\n', r"line 3: expected a row of a csv file, got unexpected end of data"),
        ("label,text\n1," + "a" * 140_000, r"line 2: expected fields of at most 131,072 characters, got field larger"),
    ],
)
def test_broken_csv_files_are_refused_with_the_line(tmp_path, content, message):
    with pytest.raises(BlockSparseError, match=message):
        reviews.read_csv(write(tmp_path / "a.csv", content))


def test_csv_files_that_cannot_be_split_or_read(tmp_path):
    write(tmp_path / "a.csv", "label,text\n" + "1,a\n" * 50 + "0,b\n" * 9)
    with pytest.raises(BlockSparseError, match=r"a\.csv: expected 10 texts of each class or more, .* got 9 of one"):
        reviews.load(tmp_path / "a.csv")
    with pytest.raises(BlockSparseError, match="csv file: expected a readable file"):
        reviews.read_csv(tmp_path)


def test_limited_keeps_the_shares_and_says_what_it_needs(tmp_path):
    rows = "".join(f"{int(i % 4 == 0)},{i}\n" for i in range(400))
    splits = reviews.load(write(tmp_path / "a.csv", f"label,text\n{rows}"))
    small = splits.limited(36)
    assert [(len(part), sum(part.labels)) for part in (small.train, small.validation)] == [(36, 9), (36, 9)]
    assert small == splits.limited(36)
    assert set(small.train.texts) <= set(splits.train.texts)
    assert splits.limited(1000) == splits
    assert [sum(part.labels) for part in (splits.limited(2).train, splits.limited(2).test)] == [1, 1]
    with pytest.raises(BlockSparseError, match="limit: expected 2 texts or more"):
        splits.limited(1)
