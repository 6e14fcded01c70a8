from __future__ import annotations

import gzip
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltafl import Config, data, models
from deltafl.data.text.catalog import TEXTS
from deltafl.data.text.entry import Edition, RawFile, TextEntry

pytest.importorskip("transformers")
pytest.importorskip("flwr")  # here, where its imports may warn

WORDS = (
    ("market", "shares", "oil", "profit", "bank", "price"),
    ("match", "goal", "team", "coach", "season", "cup"),
    ("chip", "software", "web", "phone", "space", "code"),
)
FILLERS = ("the", "a", "of", "in", "said", "on", "new", "after", "over", "for")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def rows(count: int, seed: int) -> tuple[list[str], list[int]]:
    """Texts of very different lengths, a few words of which tell their class."""
    draw = random.Random(seed)
    texts, labels = [], []
    for number in range(count):
        label = number % len(WORDS)
        words = [draw.choice(FILLERS) for _ in range(draw.randrange(1, 20))]
        words += [draw.choice(WORDS[label]) for _ in range(draw.randrange(1, 4))]
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label)
    return texts, labels


@pytest.fixture(scope="session")
def tiny_distilbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has them, with a DistilBERT of two narrow layers and its own words."""
    models.text.transformers("tiny")
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece
    from transformers import DistilBertConfig, DistilBertForMaskedLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("weights") / "tiny-distilbert"
    words = {
        word: number
        for number, word in enumerate(
            [*SPECIAL, *FILLERS, *(word for some in WORDS for word in some)]
        )
    }
    tokenizer = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = DistilBertConfig(
        vocab_size=len(words), dim=16, hidden_dim=32, n_layers=2, n_heads=2,
        max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    # As the published weights: of another task, without a classifier.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        DistilBertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_distilbert: Path):
    return models.tokenizer("transformer", str(tiny_distilbert), 32)


@pytest.fixture(scope="session")
def texts(tokenizer) -> data.TextDataset:
    return data.TextDataset.from_texts("toy", rows(240, 0), rows(60, 1), tokenizer)


@pytest.fixture
def small_text(tiny_distilbert: Path) -> Config:
    return Config.model_validate(
        {
            "task": "own-transformer",
            "model": {"weights": str(tiny_distilbert), "max_tokens": 32},
            "federation": {"clients": 6, "samples": 40, "participation": 0.5, "alpha": 1.0},
            "client": {"batch_size": 8},
            "run": {"rounds": 2, "checkpoint_seconds": 0},
            "engine": {"kind": "inline"},
        }
    )


def write_csv(path: Path, texts: list[str], labels: list[int]) -> str:
    lines = [f'"{label + 1}","{text}"\n' for text, label in zip(texts, labels, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextEntry:
    """A text set of the catalog of which a part is in the data folder, and nothing else is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "store"))
    place = tmp_path / "store" / "toy"
    files = tuple(
        RawFile(f"{which}.csv.gz", write_csv(place / f"{which}.csv.gz", *rows(count, count)))
        for which, count in (("train", 90), ("test", 30))
    )
    whole = RawFile("train.csv", "md5:0", "http://127.0.0.1:9/train.csv")
    entry = TextEntry(
        name="toy",
        classes=("money", "sport", "things"),
        licence="none",
        citation="nobody",
        editions=(
            Edition((whole,), train=900, test=300, columns=2, text=(1,)),
            Edition(files, train=90, test=30, columns=2, text=(1,), part="a part, 90 of 900 rows"),
        ),
        folders=("toy",),
    )
    monkeypatch.setitem(TEXTS, "toy", entry)
    return entry


@pytest.fixture
def csv_writer() -> Callable[..., str]:
    return write_csv
