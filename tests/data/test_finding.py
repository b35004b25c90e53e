"""What a directory stands for: text of every kind below it, and what is left out, named."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from lowprec_train.data import finding
from lowprec_train.data.documents import TextFiles


def put(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            parquet.write_table(pyarrow.table({"text": [name], "lang": ["en"]}), path)
        else:
            path.write_text('{"text": "x"}\n')
    return root


def test_a_data_set_of_a_hub(tmp_path, caplog):
    """Shards in folders, in order; the card, hidden files and other kinds are no text of it."""
    shards = [f"en/train-{number:05d}-of-00012.parquet" for number in range(12)] + ["fr/0000.parquet"]
    put(tmp_path, *shards, "README.md", ".gitattributes", ".cache/huggingface/x.jsonl", "data_infos.json")
    assert [document.text for document in TextFiles(str(tmp_path))] == shards
    assert [document.text for document in TextFiles(str(tmp_path), "lang")] == ["en"] * 13
    skipped, card = caplog.messages[:2]
    assert "1 other (data_infos.json)" in skipped and "README.md; name it to read it too" in card
    assert len(caplog.messages) == 4
    assert [source.name for source in finding.find([tmp_path / "README.md"])] == ["README.md"]


def test_shards_behind_links(tmp_path):
    """As the cache of a hub lays out a snapshot: names that point to blobs."""
    blob = put(tmp_path, "blobs/x.parquet") / "blobs" / "x.parquet"
    blob.rename(tmp_path / "blobs" / "0a1b")
    snapshot = tmp_path / "snapshots" / "main" / "data"
    snapshot.mkdir(parents=True)
    (snapshot / "train-00000-of-00001.parquet").symlink_to(tmp_path / "blobs" / "0a1b")
    assert [document.text for document in TextFiles(str(tmp_path / "snapshots"))] == ["blobs/x.parquet"]


def test_folders_behind_links(tmp_path):
    """Once, also if a link leads back to a folder above it."""
    put(tmp_path, "real/more/b.txt", "corpus/a.txt")
    (tmp_path / "corpus" / "more").symlink_to("../real/more")
    (tmp_path / "real" / "more" / "again").symlink_to("..")
    assert [source.name for source in finding.find([tmp_path / "corpus"])] == ["a.txt", "more/b.txt"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "more").symlink_to("../corpus/more")
    assert [source.name for source in finding.find([tmp_path / "only"])] == ["more/b.txt"]


def test_shards_that_are_missing_and_sets_that_are_mixed(tmp_path, caplog):
    put(tmp_path, "train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl", "test-00000-of-00001.jsonl")
    assert len(finding.find([tmp_path])) == 3
    assert caplog.messages == [
        f"warning: {tmp_path}: of 3 shards of train 1 are missing: 1",
        "warning: test, train are read as one set; name the files of one to keep them apart",
    ]


def test_pages_are_text_where_there_is_nothing_else(tmp_path, caplog):
    put(tmp_path, "README.md", "docs/a.md", "b.txt")
    assert [source.name for source in finding.find([tmp_path])] == ["README.md", "b.txt", "docs/a.md"]
    assert not caplog.messages


@pytest.mark.parametrize("name", ["a.xz", "a.csv", "a.parquet.xz"])
def test_other_kinds(tmp_path, name):
    put(tmp_path, "a.md")
    (tmp_path / name).write_text("")
    if name == "a.parquet.xz":
        return  # looked at below: packed .parquet is no kind
    with pytest.raises(
        ValueError, match=rf"{name}: not a text file that can be read: it must end in \.txt, \.md or \.jsonl"
    ):
        finding.find([tmp_path / name])
