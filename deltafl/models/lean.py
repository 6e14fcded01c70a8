"""Transformers that keep less for their gradient, and compute the same up to rounding.

Of a batch of 16 texts of 128 tokens, torch keeps some 80 MB for each layer of MiniLM. Much of it is
quickly computed again from what is kept as well: attention's weights, and what the activation
lets through. Dropout's factors are two, which a byte tells apart.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ATTENTION = "deltafl"
"""What transformers calls the attention below."""

PAIRS = 200_000
"""Pairs of tokens, over all heads, whose numbers are computed together."""


def slim(body: Any) -> None:
    """Let a model of transformers compute so, as far as its parts are known."""
    for part in body.modules():
        if type(part) is nn.Dropout and not part.inplace:
            part.__class__ = Dropout
        _join_activation(part)
    library = importlib.import_module("transformers")  # an extra
    functions = getattr(library, "AttentionInterface", None)  # older versions have none
    masks = getattr(library, "AttentionMaskInterface", None)
    if functions and masks and body.config._attn_implementation == "sdpa":
        functions.register(ATTENTION, attention)
        masks.register(ATTENTION, masks()["sdpa"])
        body.config._attn_implementation = ATTENTION


def _join_activation(part: nn.Module) -> None:
    """Let the second linear layer of a feed-forward network compute the activation before it."""
    first, second = getattr(part, "intermediate", None), getattr(part, "output", None)  # BERT
    name, linear = "intermediate_act_fn", getattr(second, "dense", None)
    if hasattr(part, "lin2"):  # DistilBERT
        first, name, linear = part, "activation", part.lin2
    activation = getattr(first, name, None)
    if first is not None and type(linear) is nn.Linear and _is_gelu(activation):
        setattr(first, name, nn.Identity())
        linear.__class__ = GeluLinear


def _is_gelu(module: object) -> bool:
    return type(module).__name__ == "GELUActivation" and getattr(module, "act", None) is F.gelu


class Dropout(nn.Dropout):
    """Dropout that keeps a byte an element."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop elements while training."""
        if not self.training or not 0 < self.p < 1 or inputs.device.type != "cpu":
            return super().forward(inputs)
        outputs: Tensor = _Dropout.apply(inputs, self.p)  # type: ignore[no-untyped-call]
        return outputs


class GeluLinear(nn.Linear):
    """A linear layer after a GELU that is not kept."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the activation, and the layer to that."""
        if not torch.is_grad_enabled():
            return super().forward(F.gelu(inputs))
        outputs: Tensor = _GeluLinear.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return outputs


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers asks for it: [N, heads, tokens, features] become [N, tokens, ...].

    With dropout, torch's own attention on a CPU keeps several numbers for every pair of tokens.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = (
        query.device.type == "cpu"
        and query.shape[1] == key.shape[1]
        and (attention_mask is None or _leaves_keys(attention_mask))
        and (attention_mask is not None or not causal)
        and not any(isinstance(other, Tensor) for other in others.values())
    )
    if not plain or not 0 < dropout < 1:
        library = _sdpa()
        answer: tuple[Tensor, None] = library(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **others,
        )
        return answer
    root = math.sqrt(query.shape[-1] ** -0.5 if scaling is None else scaling)
    heeded: Tensor = _Attention.apply(query, key, value, attention_mask, dropout, root)  # type: ignore[no-untyped-call]
    return heeded.transpose(1, 2).contiguous(), None


def _sdpa() -> Any:
    functions: Any = importlib.import_module("transformers").AttentionInterface  # an extra
    return functions()["sdpa"]


def _leaves_keys(mask: Tensor) -> bool:
    """Say whether every token may look at some other."""
    return mask.dtype == torch.bool and bool(mask.any(-1).all())


def _factors(kept: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return kept.to(dtype).div_(1 - p)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, p: float) -> Tensor:
        kept = torch.empty_like(inputs, dtype=torch.bool).bernoulli_(1 - p)
        ctx.save_for_backward(kept)
        ctx.p = p
        return _factors(kept, p, inputs.dtype).mul_(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _factors(kept, ctx.p, gradient.dtype).mul_(gradient), None


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return F.linear(F.gelu(inputs), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        into, of_weight, of_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        back = passed = None
        if of_weight:
            passed = flat.t().mm(F.gelu(inputs).view(-1, inputs.shape[-1]))
        if into:
            back = flat.mm(weight).view(inputs.shape)
            back = torch.ops.aten.gelu_backward(back, inputs)
        return back, passed, flat.sum(0) if of_bias else None


class _Attention(torch.autograd.Function):
    """softmax(root Q (root K)^T) with dropout, times V: torch's own way, a few texts at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        p: float,
        root: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.p, ctx.root, ctx.kept = p, root, []
        outputs = []
        for some in _pieces(query, key):
            shares = _shares(query[some] * root, key[some] * root, _of(mask, some))
            kept = torch.empty_like(shares, dtype=torch.bool).bernoulli_(1 - p)
            ctx.kept.append(kept)
            outputs.append(shares.mul_(_factors(kept, p, shares.dtype)) @ value[some])
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, mask = ctx.saved_tensors
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for some, kept in zip(_pieces(query, key), ctx.kept, strict=True):
            queries, keys = query[some] * ctx.root, key[some] * ctx.root
            shares = _shares(queries, keys, _of(mask, some))
            factors = _factors(kept, ctx.p, shares.dtype)
            found[2][some] = (shares * factors).transpose(-2, -1) @ gradient[some]
            of_shares = factors.mul_(gradient[some] @ value[some].transpose(-2, -1))
            scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
            found[0][some] = (scores @ keys).mul_(ctx.root)
            found[1][some] = (queries.transpose(-2, -1) @ scores).mul_(ctx.root).transpose(-2, -1)
        del ctx.kept
        return *found, None, None, None


def _pieces(query: Tensor, key: Tensor) -> list[slice]:
    """Cut a batch so that the numbers for every pair of tokens stay in the cache."""
    pairs = query.shape[1] * query.shape[2] * key.shape[2]
    step = max(1, PAIRS // pairs)
    return [slice(start, start + step) for start in range(0, len(query), step)]


def _of(mask: Tensor | None, some: slice) -> Tensor | None:
    return mask if mask is None or len(mask) == 1 else mask[some]


def _shares(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return how much of each key a query takes."""
    scores = query @ key.transpose(-2, -1)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    return scores.softmax(-1)
