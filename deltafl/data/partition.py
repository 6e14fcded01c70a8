"""Who holds what: the training set dealt to clients.

Section 4 ("Datasets and models") and the appendix "Illustration of the degree of heterogeneity",
after Hsu et al. 2019: client i draws q_i ~ Dir(alpha p), then each of its n_i labels from q_i,
then a sample of each label. The prior p is the class distribution of the training set, scaled to
a mean of 1: with equal classes Dir(alpha, ..., alpha). Only that gives what the appendix shows,
clients close to IID at alpha = 1; with a p that sums to 1 they would hold two or three of ten
classes there. The appendix "Additional experiments using different number of local data per
client" draws n_i uniformly from a range.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from deltafl.errors import UserError
from deltafl.seeding import numpy_generator

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Below this, 1 / (alpha p) leaves the range of float64; such clients hold one class anyway.
SMALLEST_ALPHA = 1e-100


class Partition(ABC):
    """Which rows of the training set each client holds; a function of the seed alone."""

    def __init__(self, labels: Ints, classes: int, clients: int) -> None:
        self.clients = clients
        self.classes = classes
        self._labels = labels

    @abstractmethod
    def indices(self, client: int) -> Ints:
        """Return the training-set rows of a client, in random order."""

    @abstractmethod
    def size(self, client: int) -> int:
        """Return how many rows a client holds, without working out which."""

    def counts(self, clients: Iterable[int] | None = None) -> Ints:
        """Return how many samples of each class the clients hold, one row per client."""
        chosen = range(self.clients) if clients is None else clients
        rows = [
            np.bincount(self._labels[self.indices(client)], minlength=self.classes)
            for client in chosen
        ]
        return np.array(rows, dtype=np.int64).reshape(len(rows), self.classes)

    def _check(self, client: int) -> None:
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} is not in a federation of {self.clients}")


class Sizes:
    """How many samples each client holds: the same for all, or uniform in a range."""

    def __init__(self, low: int, high: int, seed: int) -> None:
        self.low = low
        self.high = high
        self._seed = seed

    def __getitem__(self, client: int) -> int:
        if self.low == self.high:
            return self.low
        generator = numpy_generator(self._seed, "partition", "size", client)
        return int(generator.integers(self.low, self.high, endpoint=True))


class Mixtures:
    """The class proportions of each client, q_i ~ Dir(alpha p), kept as logarithms.

    At the paper's alpha = 0.01 most Gamma(0.01) variates are below 1e-30 and many underflow to
    zero, at smaller alphas all of a client's at once. Their logarithms do not: Gamma(a) has the
    law of Gamma(a + 1) U^(1/a), and the logarithm of a uniform U is minus an exponential variate.
    """

    def __init__(self, alpha: float, prior: Floats, seed: int) -> None:
        self._concentration = alpha * prior
        self._seed = seed

    def log_weights(self, client: int) -> Floats:
        """Return log q_i up to an additive constant; -inf for classes without samples."""
        generator = numpy_generator(self._seed, "partition", "mixture", client)
        present = self._concentration > 0
        shape = self._concentration[present]
        weights = np.full(len(self._concentration), -np.inf)
        weights[present] = (
            np.log(generator.standard_gamma(shape + 1))
            - generator.standard_exponential(len(shape)) / shape
        )
        return weights


def draw_labels(log_weights: Floats, count: int, generator: np.random.Generator) -> Ints:
    """Draw class numbers with probabilities proportional to the exponentials of the weights.

    By inverting the distribution function: a class of weight zero (-inf) is never drawn, not even
    by rounding, as it can be by numpy's multinomial.
    """
    cumulative = np.exp(log_weights - log_weights.max()).cumsum()
    cumulative /= cumulative[-1]
    return np.searchsorted(cumulative, generator.random(count), side="right")


class DrawnPartition(Partition):
    """With replacement: each client draws alone, when asked, so a million cost nothing."""

    def __init__(
        self,
        labels: Ints,
        *,
        classes: int,
        clients: int,
        sizes: Sizes,
        mixtures: Mixtures | None,
        seed: int,
    ) -> None:
        super().__init__(labels, classes, clients)
        self._sizes = sizes
        self._mixtures = mixtures
        self._seed = seed
        # The rows of class c are _by_class[_starts[c] : _starts[c] + _totals[c]].
        self._by_class = np.argsort(labels, kind="stable")
        self._totals = np.bincount(labels, minlength=classes)
        self._starts = np.cumsum(self._totals) - self._totals

    def size(self, client: int) -> int:
        """Return how many rows a client holds."""
        self._check(client)
        return self._sizes[client]

    def indices(self, client: int) -> Ints:
        """Draw the rows of a client: the same ones each time it is asked."""
        size = self.size(client)
        generator = numpy_generator(self._seed, "partition", "draw", client)
        if self._mixtures is None:
            return generator.integers(len(self._labels), size=size)
        drawn = draw_labels(self._mixtures.log_weights(client), size, generator)
        rows: Ints = self._by_class[self._starts[drawn] + generator.integers(self._totals[drawn])]
        return rows


class DealtPartition(Partition):
    """Without replacement: no row is held twice; dealt once, in the order of the clients."""

    def __init__(
        self,
        labels: Ints,
        *,
        classes: int,
        clients: int,
        sizes: Sizes,
        mixtures: Mixtures | None,
        seed: int,
    ) -> None:
        super().__init__(labels, classes, clients)
        wanted = np.array([sizes[client] for client in range(clients)], dtype=np.int64)
        self._ends = np.cumsum(wanted)
        if self._ends[-1] > len(labels):
            raise UserError(
                f"{clients} clients ask for {self._ends[-1]} samples but the training set has "
                f"{len(labels)}: ask for fewer samples or clients, or draw with replacement"
            )
        generator = numpy_generator(seed, "partition", "deal")
        shuffled = generator.permutation(len(labels))
        if mixtures is None:
            self._rows = shuffled[: self._ends[-1]]
        else:
            pools = [shuffled[labels[shuffled] == label] for label in range(classes)]
            self._rows = deal(pools, wanted, mixtures, generator)

    def size(self, client: int) -> int:
        """Return how many rows a client holds."""
        self._check(client)
        return int(self._ends[client] - self._start(client))

    def indices(self, client: int) -> Ints:
        """Return a copy of the rows of a client."""
        self._check(client)
        return self._rows[self._start(client) : self._ends[client]].copy()

    def _start(self, client: int) -> int:
        return int(self._ends[client - 1]) if client else 0


def deal(
    pools: list[Ints], wanted: Ints, mixtures: Mixtures, generator: np.random.Generator
) -> Ints:
    """Deal every client its labels out of the classes' shuffled pools, one client after another.

    Drawing labels one by one from q_i, and from q_i renormalised over the classes that remain
    once one has run out, has the law of what happens here: draw all at once, give back what a
    class does not have, and draw that many again from the classes that remain. The logarithms
    of q_i always leave mass on them.
    """
    left = np.array([len(pool) for pool in pools], dtype=np.int64)
    rows: list[Ints] = []
    for client, size in enumerate(wanted):
        log_weights = mixtures.log_weights(client)
        taken = np.zeros_like(left)
        while (missing := int(size - taken.sum())) > 0:
            remaining = np.where(left > taken, log_weights, -np.inf)
            drawn = draw_labels(remaining, missing, generator)
            taken = np.minimum(taken + np.bincount(drawn, minlength=len(left)), left)
        hand = [pool[n - k : n] for pool, n, k in zip(pools, left, taken, strict=True) if k]
        left -= taken
        rows.append(generator.permutation(np.concatenate(hand)))
    return np.concatenate(rows)


def make_partition(
    labels: npt.ArrayLike,
    *,
    classes: int,
    clients: int,
    samples: int | tuple[int, int] | None = None,
    alpha: float | None = None,
    replacement: bool = False,
    seed: int = 0,
) -> Partition:
    """Deal the training set with these labels to clients.

    `samples` is the number of samples a client, or a range (low, high) to draw it from uniformly;
    None means 500, or an equal share where there are not that many. `alpha` is the Dirichlet
    concentration, None means identically distributed. With `replacement` every client draws
    independently of the others; without, a class that runs out leaves the others to be drawn.
    """
    known = np.asarray(labels)
    if known.ndim != 1 or known.size == 0 or not np.issubdtype(known.dtype, np.integer):
        raise UserError(
            f"labels to partition are {known.dtype} of shape {known.shape}: "
            "give one class number per training sample, and at least one"
        )
    if classes < 1 or known.min() < 0 or known.max() >= classes:
        raise UserError(
            f"labels run from {known.min()} to {known.max()} but there are {classes} classes: "
            "use class numbers from 0 to classes - 1"
        )
    if clients < 1:
        raise UserError(f"clients = {clients}: a federation needs at least 1")
    if alpha is not None and not SMALLEST_ALPHA <= alpha < math.inf:
        raise UserError(
            f"alpha = {alpha}: the Dirichlet concentration is a positive number "
            "(0.01, 0.1 and 1 in the paper); leave it out for identically distributed clients"
        )
    if samples is None:
        samples = max(1, min(500, len(known) // clients))
    low, high = samples if isinstance(samples, tuple) else (samples, samples)
    if not 1 <= low <= high:
        raise UserError(
            f"samples = {samples}: give each client at least 1, or a range (low, high) that rises"
        )
    if not replacement and clients * low > len(known):
        # Before anything of that size is made: the number of clients is the user's to mistype.
        raise UserError(
            f"{clients} clients ask for at least {clients * low} samples but the training set has "
            f"{len(known)}: ask for fewer samples or clients, or draw with replacement"
        )
    rows = known.astype(np.int64)
    sizes = Sizes(low, high, seed)
    prior = classes * np.bincount(rows, minlength=classes) / len(rows)
    mixtures = None if alpha is None else Mixtures(alpha, prior, seed)
    kind = DrawnPartition if replacement else DealtPartition
    return kind(rows, classes=classes, clients=clients, sizes=sizes, mixtures=mixtures, seed=seed)
