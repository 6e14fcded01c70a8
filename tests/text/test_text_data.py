from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafl import data
from deltafl.cli import main
from deltafl.client import LocalWork, batches
from deltafl.data.text import store
from deltafl.data.text.catalog import TEXTS
from deltafl.data.text.dataset import WINDOW, TokenSamples
from deltafl.data.text.entry import Edition, RawFile
from deltafl.errors import UserError
from deltafl.objective import CrossEntropy
from deltafl.seeding import torch_generator


def samples_of(lengths: list[int]) -> TokenSamples:
    """Sample i is its own number i + 1, as often as it is long."""
    tokens = torch.cat([torch.full((n,), i + 1, dtype=torch.int32) for i, n in enumerate(lengths)])
    sizes = torch.tensor(lengths)
    return TokenSamples(tokens, sizes.cumsum(0) - sizes, sizes, torch.arange(len(lengths)), pad=0)


def test_a_batch_is_padded_to_its_longest_and_masked():
    inputs, labels = samples_of([2, 4, 1]).batch(torch.tensor([2, 0]))
    assert inputs["input_ids"].tolist() == [[3, 0], [1, 1]]
    assert inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert inputs["input_ids"].dtype == torch.int64
    assert labels.tolist() == [2, 0]


def test_a_batch_of_one_length_has_no_mask():
    inputs, _ = samples_of([3, 3]).batch(torch.tensor([1, 0]))
    assert set(inputs) == {"input_ids"}
    assert inputs.to("cpu")["input_ids"].tolist() == [[2, 2, 2], [1, 1, 1]]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=300),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_grouping_keeps_the_steps_and_the_samples(lengths, batch, epochs, keep, seed):
    samples = samples_of(lengths)
    work = LocalWork(CrossEntropy(), "sgd", epochs=epochs, batch_size=batch, keep_last=keep)
    plain = list(batches(len(samples), work, seed))
    grouped = list(samples.grouped(plain, torch_generator(seed, "groups")))
    again = list(samples.grouped(plain, torch_generator(seed, "groups")))
    assert [rows.tolist() for rows in grouped] == [rows.tolist() for rows in again]
    assert len(grouped) == len(plain)
    assert sorted(map(len, grouped)) == sorted(map(len, plain))
    # Samples move within their window only, so epochs do not run into each other.
    for start in range(0, len(plain), WINDOW):
        window = slice(start, start + WINDOW)
        assert torch.cat(grouped[window]).sort()[0].equal(torch.cat(plain[window]).sort()[0])


def test_grouping_halves_the_padding_and_shuffles():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 100, (512,), generator=generator).tolist()
    samples = samples_of(lengths)
    work = LocalWork(CrossEntropy(), "sgd", batch_size=16)

    def waste(index):
        tokens = [samples.batch(rows)[0]["input_ids"] for rows in index]
        return sum(int((t == 0).sum()) for t in tokens) / sum(t.numel() for t in tokens)

    plain = list(batches(len(samples), work, 5))
    grouped = list(samples.grouped(plain, torch_generator(5, "groups")))
    assert waste(grouped) < 0.1 < waste(plain)
    longest = [int(samples.lengths[rows].max()) for rows in grouped]
    assert longest != sorted(longest)
    other = list(samples.grouped(batches(len(samples), work, 6), torch_generator(6, "groups")))
    assert {frozenset(rows.tolist()) for rows in other} != {
        frozenset(rows.tolist()) for rows in grouped
    }


def test_all_batches_hold_every_sample_once():
    samples = samples_of([5, 1, 9, 9, 2] * 13)
    seen = torch.cat([labels for _, labels in samples.all_batches()])
    assert sorted(seen.tolist()) == list(range(65))


def test_rows_of_a_split_are_those_asked_for(texts, tokenizer):
    samples = texts.samples(texts.train, [7, 0])
    inputs, labels = samples.batch(torch.tensor([0, 1]))
    assert labels.tolist() == texts.train.labels[[7, 0]].tolist()
    assert int((inputs["input_ids"][0] != tokenizer.pad).sum()) == int(samples.lengths[0])
    first = texts.samples(texts.train).batch(torch.tensor([0]))[0]["input_ids"]
    assert first.tolist() == [inputs["input_ids"][1][: first.shape[1]].tolist()]


def test_a_part_is_tokenised_once_and_says_what_it_is(toy, tokenizer, monkeypatch):
    first = data.load("toy", tokenizer=tokenizer)
    assert (len(first.train), len(first.test), first.part) == (90, 30, "a part, 90 of 900 rows")
    monkeypatch.setattr(store, "write", lambda *_: pytest.fail("the tokens are there"))
    again = data.load("toy", tokenizer=tokenizer)
    assert again.fingerprint() == first.fingerprint()
    direct = tokenizer([data.load("toy").train.texts[5]])[0]
    one = again.samples(again.train, [5]).batch(torch.tensor([0]))[0]["input_ids"]
    assert one[0].tolist() == direct


def test_a_set_of_the_catalog_pickles_as_a_reference(toy, tokenizer):
    loaded = data.load("toy", tokenizer=tokenizer)
    content = pickle.dumps(loaded)
    assert len(content) < 3000
    assert pickle.loads(content).fingerprint() == loaded.fingerprint()
    by_value = loaded.by_value()
    assert pickle.loads(pickle.dumps(by_value)).fingerprint() == loaded.fingerprint()


def test_another_length_has_tokens_of_its_own(toy, tokenizer, tiny_distilbert):
    from deltafl import models

    shorter = models.tokenizer("transformer", str(tiny_distilbert), 4)
    assert shorter.key != tokenizer.key
    cut = data.load("toy", tokenizer=shorter)
    assert int(cut.samples(cut.train).lengths.max()) == 4
    assert int(data.load("toy", tokenizer=tokenizer).samples(cut.train).lengths.max()) == 4


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda place: (place / "train-tokens.npy").write_bytes(b"nothing"), "cannot be read"),
        (lambda place: np.save(place / "train-ends.npy", np.arange(3)), "3 rows where 90"),
        (lambda place: (place / "manifest.json").write_text("{"), "cannot be read"),
        (
            lambda place: np.save(place / "test-labels.npy", np.zeros(30, np.int64)),
            "altered",
        ),
    ],
)
def test_a_damaged_store_is_named(toy, tokenizer, tmp_path, damage, complaint):
    data.load("toy", tokenizer=tokenizer)
    (place,) = (tmp_path / "store" / "toy").glob("tokens-*")
    damage(place)
    with pytest.raises(UserError, match=complaint) as caught:
        data.load("toy", tokenizer=tokenizer)
    assert f"delete {place}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_raw_file_that_was_changed_is_refused(toy, tokenizer, tmp_path):
    path = tmp_path / "store" / "toy" / "train.csv.gz"
    path.write_bytes(gzip.compress(b'"1","other"\n'))
    with pytest.raises(UserError, match=r"train\.csv\.gz: .*checksum"):
        data.load("toy", tokenizer=tokenizer)
    with pytest.raises(UserError, match="checksum"):
        data.verify("toy")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'"1","a"\n"7","b"\n', "row 2 of the train set is not a sample"),
        (b'"1","a","b"\n', "row 1"),
        (b'"1"\n', "row 1"),
        (b'"","a"\n', "row 1"),
        (b'"1","a"\n', "1 rows in the train set where 2"),
        (b'"1","\xff"\n', "cannot be read as CSV"),
        (b'"1","' + b"a" * 200_000 + b'"\n', "cannot be read as CSV"),
    ],
)
def test_rows_that_are_no_samples_are_named(tmp_path: Path, content: bytes, complaint: str):
    (tmp_path / "train.csv").write_bytes(content)
    files = (RawFile("train.csv", "md5:"), RawFile("test.csv", "md5:"))
    edition = Edition(files, train=2, test=1, columns=2, text=(1,))
    with pytest.raises(UserError, match=complaint) as caught:
        edition.rows(tmp_path, "train", 3)
    assert str(caught.value).startswith(str(tmp_path / "train.csv"))


def test_splits_are_read_out_of_an_archive(tmp_path: Path):
    path = tmp_path / "set.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in (("x/train.csv", b"1,t,a b\n2,u,c\n"), ("x/test.csv", b"2,v,d\n")):
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    checksum = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    members = ("x/train.csv", "x/test.csv")
    files = (RawFile("set.tgz", checksum),)
    edition = Edition(files, train=2, test=1, columns=3, text=(1, 2), members=members)
    edition.verify(tmp_path)
    assert edition.rows(tmp_path, "train", 2) == (["t a b", "u c"], [0, 1])
    assert edition.rows(tmp_path, "test", 2) == (["v d"], [1])
    elsewhere = Edition(files, 2, 1, columns=3, text=(2,), members=("y", "z"))
    with pytest.raises(UserError, match="has no file y"):
        elsewhere.rows(tmp_path, "train", 2)


def test_the_whole_set_is_preferred_and_a_part_kept_where_it_cannot_be_had(toy, capsys):
    row = next(row for row in data.status() if row.name == "toy")
    assert (row.here, row.train, row.part) == (True, 90, "a part, 90 of 900 rows")
    assert data.get("toy").part == "a part, 90 of 900 rows"
    assert "no download from 127.0.0.1:9" in capsys.readouterr().err
    (Path(row.where) / "train.csv").write_text("")
    assert next(row for row in data.status() if row.name == "toy").part is None


def test_the_command_says_what_is_a_part(toy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["data", "verify", "toy"]) == 0
    assert "a part, 90 of 900 rows" in capsys.readouterr().out


def test_a_set_that_is_nowhere_asks_to_be_fetched(toy, tokenizer, tmp_path):
    for path in (tmp_path / "store" / "toy").glob("*.gz"):
        path.unlink()
    with pytest.raises(UserError, match="deltafl data get toy"):
        data.load("toy", tokenizer=tokenizer, download=False)
    with pytest.raises(UserError, match="deltafl data get toy"):
        data.verify("toy")
    with pytest.raises(UserError, match=r"no download from 127.0.0.1:9.*put train.csv into"):
        data.load("toy", tokenizer=tokenizer)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_real_sets_are_balanced_and_read_whole(name):
    entry = TEXTS[name]
    if not next(row for row in data.status() if row.name == name).here:
        pytest.skip(f"{name} is not on this machine")
    found = data.load(name, download=False)
    for split in (found.train, found.test):
        counts = split.labels.bincount(minlength=len(entry.classes))
        assert len(set(counts.tolist())) == 1
        assert all(text.strip() for text in split.texts[:500])


def test_own_texts_need_a_label_each(tokenizer):
    with pytest.raises(UserError, match="2 texts but 1 labels"):
        data.TextDataset.from_texts("mine", (["a", "b"], [0]), (["a"], [0]), tokenizer)
    with pytest.raises(UserError, match="labels run from 4 to 4"):
        data.TextDataset.from_texts(
            "mine", (["a"], [4]), (["a"], [0]), tokenizer, classes=["x", "y"]
        )
    with pytest.raises(UserError, match="no training texts"):
        data.TextDataset.from_texts("mine", ([], []), ([], []), tokenizer)


def test_the_manifest_names_what_it_is_made_of(toy, tokenizer, tmp_path):
    data.load("toy", tokenizer=tokenizer)
    (place,) = (tmp_path / "store" / "toy").glob("tokens-*/manifest.json")
    manifest = json.loads(place.read_text())
    assert manifest["tokenizer"] == tokenizer.key
    assert manifest["files"] == toy.editions[1].checksums
