"""What a transformer computes when it keeps less is what it computes otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltafl import models
from deltafl.models import lean


def kept_bytes(run) -> int:
    """Return the bytes of the distinct tensors that autograd keeps of a computation."""
    seen: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(seen.values())


@pytest.fixture
def folder(request, tmp_path, tiny_distilbert):
    if request.param == "distilbert":
        return tiny_distilbert
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=48,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("folder", ["distilbert", "bert"], indirect=True)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("pairs", [1, lean.PAIRS])
def test_losses_gradients_and_random_numbers_are_the_librarys(
    folder, texts, masked, pairs, monkeypatch
):
    monkeypatch.setattr(lean, "PAIRS", pairs)

    def build(fast):
        return models.build(
            "transformer", shape=None, classes=3, weights=str(folder), seed=0, fast=fast
        )

    ours = copy.deepcopy(build(fast=True)).train()
    plain = build(fast=False).train()
    assert {type(m) for m in ours.modules()} - {type(m) for m in plain.modules()} == {
        lean.Dropout,
        lean.GeluLinear,
        nn.Identity,
    } - {type(m) for m in plain.modules()}
    assert list(ours.state_dict()) == list(plain.state_dict())
    inputs, labels = texts.samples(texts.train).batch(torch.arange(6))
    if not masked:
        del inputs["attention_mask"]
    results = []
    for model in (plain, ours):
        torch.manual_seed(3)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([loss.detach(), *gradients, torch.rand(1)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][-1], results[1][-1])
    # Tiny matrices are summed in an order that depends on how they lie in memory.
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    kept = [kept_bytes(lambda model=model: model(inputs)) for model in (plain, ours)]
    assert kept[1] < 0.8 * kept[0]
    with torch.inference_mode():
        assert torch.equal(plain.eval()(inputs), ours.eval()(inputs))


def test_a_row_without_a_key_is_left_to_torch():
    tensors = [torch.randn(2, 1, 3, 4) for _ in range(3)]
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    mask[0, 0, 1] = False
    answer, _ = lean.attention(nn.Identity(), *tensors, mask, dropout=0.5, is_causal=False)
    assert answer.isfinite().all()
