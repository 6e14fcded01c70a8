"""Pretrained encoders that classify text, by way of transformers (Section 4: DistilBERT).

Whatever `AutoModelForSequenceClassification` loads is taken apart into its body, which represents
a text, and its last linear layer, so that objectives see the same two halves as of any model. All
of it is trained, as in the paper; the last layer starts at random.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deltafl.data.dataset import Fields
from deltafl.errors import UserError
from deltafl.models.base import Classifier
from deltafl.models.lean import slim
from deltafl.models.pretrained import missing_extra

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")

MAX_TOKENS = 128
"""What a text is cut to where the configuration does not say."""


class TextClassifier(Classifier):
    """A pretrained encoder and a new linear layer on top."""

    def __init__(self, body: nn.Module, head: nn.Linear, dropout: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.dropout = dropout
        self.head = head

    def speed_up(self) -> None:
        """Keep less for the gradient, so that a worker needs half the memory for a step."""
        super().speed_up()
        slim(self.body)

    def represent(self, inputs: Fields) -> Tensor:
        """Return what the last linear layer sees of every text, before any dropout on it."""
        representation: Tensor = self.body(**inputs, return_dict=False)[0]
        return representation

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits of a representation."""
        logits: Tensor = self.head(self.dropout(representation))
        return logits


def load(folder: Path, classes: int) -> TextClassifier:
    """Load the weights in a folder; what they lack is drawn from torch's random state."""
    library = transformers(folder.name)
    try:
        body = library.AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            num_labels=classes,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="sdpa",
            dtype="float32",
            # A last layer of another task has other classes.
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # files of somebody else's may fail in any way
        raise UserError(f"cannot load a text classifier from {folder}: {_short(error)}") from error
    name, head = _last_linear(body, classes, folder)
    owner = body.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], nn.Identity())
    dropout: nn.Module = nn.Identity()
    # Where it lies right before the last layer, as in BERT and DistilBERT, it is not the body's.
    if owner is body and isinstance(getattr(body, "dropout", None), nn.Dropout):
        dropout, body.dropout = body.dropout, nn.Identity()
    # Drawn here, so that it depends on the seed and not on how the library fills weights in.
    nn.init.normal_(head.weight, std=float(getattr(body.config, "initializer_range", 0.02)))
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return TextClassifier(body, head, dropout)


def _last_linear(body: nn.Module, classes: int, folder: Path) -> tuple[str, nn.Linear]:
    layers = [(n, layer) for n, layer in body.named_modules() if isinstance(layer, nn.Linear)]
    if not layers or layers[-1][1].out_features != classes:
        raise UserError(f"the model in {folder} does not end in a linear layer: use another")
    return layers[-1]


class PretrainedTokenizer:
    """The words of a pretrained model."""

    def __init__(self, folder: Path, max_tokens: int = MAX_TOKENS) -> None:
        library = transformers(folder.name)
        # The library would make one up that knows no word.
        if not any((folder / name).is_file() for name in VOCABULARIES):
            raise UserError(f"{folder} has no tokenizer: it needs one of {', '.join(VOCABULARIES)}")
        try:
            found = library.AutoTokenizer.from_pretrained(
                str(folder), use_fast=True, trust_remote_code=False, local_files_only=True
            )
            self._words = found.backend_tokenizer
            self.pad = int(found.pad_token_id or 0)
        except Exception as error:
            raise UserError(f"cannot load a tokenizer from {folder}: {_short(error)}") from error
        self._words.no_padding()
        self._words.enable_truncation(max_tokens)

    @property
    def key(self) -> str:
        """All that its numbers depend on: its words and rules, and where texts are cut."""
        return hashlib.sha256(f"{self.pad} {self._words.to_str()}".encode()).hexdigest()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every text; the library spreads the work over the cores."""
        return [found.ids for found in self._words.encode_batch_fast(list(texts))]


def transformers(name: str) -> Any:
    """Import transformers, which is an extra: offline, silent, and without telemetry."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError:
        raise missing_extra(name) from None
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
