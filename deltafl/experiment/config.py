"""The typed configuration of an experiment: frozen, validated, unknown keys refused.

It is read from TOML, every field can be overridden, and its hash names the run: two configurations
with the same `identity` compute the same bits.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltafl import data, models, objective, optim, server
from deltafl.errors import UserError, unknown
from deltafl.untrusted import LARGEST_TEXT, brief, read_plain
from deltafl.version import __version__

OWN_DATA = "own"
"""The data set of a task whose data is given in Python, as in own-mlp."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = bool | int | Finite
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Size = Annotated[int, Field(ge=1, le=10**8)]


class Strict(BaseModel):
    """A frozen section that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class FederationConfig(Strict):
    """Who holds what, and who takes part."""

    clients: Count = Field(100, description="number of clients")
    samples: Size | tuple[Size, Size] | None = Field(
        None, description="samples of a client: a number, or LOW HIGH; none: 500, or what there is"
    )
    partition: Literal["dirichlet", "iid"] = Field(
        "dirichlet", description="how labels are spread over clients"
    )
    alpha: Positive = Field(0.1, description="Dirichlet concentration; small is heterogeneous")
    replacement: bool = Field(False, description="whether clients may share samples")
    participation: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="share of the clients in a round"
    )
    attack: (
        Literal["nan", "inf", "huge", "shape", "dtype", "empty", "no-samples", "sign-flip"] | None
    ) = Field(None, description="what bad clients send, to see what follows; none: all are good")
    attackers: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the clients that are bad, with attack"
    )

    @model_validator(mode="after")
    def _attackers_attack(self) -> Self:
        if (self.attack is None) != (self.attackers == 0):
            raise UserError(
                "federation.attack and federation.attackers belong together: give what bad clients "
                "send, as sign-flip, and their share, as 0.2, or neither"
            )
        return self

    @property
    def sampled(self) -> int:
        """How many clients take part in a round."""
        return max(1, round(self.participation * self.clients))


class ModelConfig(Strict):
    """Variations of the task's model."""

    width: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="channels (resnet) or hidden units (mlp)"
    )
    norm: Literal["batch", "group"] | None = Field(None, description="normalisation of a resnet")
    weights: str | None = Field(
        None, description="folder or hub name of a text model's pretrained weights"
    )
    max_tokens: Annotated[int, Field(ge=2, le=2**16)] | None = Field(
        None, description="length that texts are cut to; none: 128"
    )


class ClientConfig(Strict):
    """What a client does in a round."""

    optimizer: str = Field("delta-sgd", description="a name of the catalog, or an import path")
    lr: Rate | None = Field(None, description="learning rate (eta_0 of delta-sgd)")
    options: dict[str, Number | str] = Field(
        default_factory=dict, description="further arguments of the optimizer, as name=value"
    )
    objective: str = Field("cross-entropy", description="cross-entropy, fedprox or moon")
    objective_options: dict[str, Finite] = Field(
        default_factory=dict, description="arguments of the objective, as mu=1"
    )
    epochs: Count = Field(1, description="passes over the client's samples (E)")
    batch_size: Size = Field(64, description="samples of a step (b)")
    last_batch: Literal["drop", "keep"] = Field(
        "drop", description="what becomes of samples that do not fill a batch"
    )
    augment: Literal["none", "crop-flip"] | None = Field(
        None, description="augmentation; none given: the data set's own"
    )


class ServerConfig(Strict):
    """How the clients' weights become the next global weights."""

    optimizer: str = Field("average", description="average, weighted-average, fedadam, ...")
    weighting: Literal["equal", "samples"] | None = Field(
        None, description="weight of a client; none given: the optimizer's own"
    )
    lr: Rate | None = Field(None, description="step size of the server's optimizer")
    options: dict[str, Number] = Field(
        default_factory=dict, description="further arguments of the server's optimizer"
    )
    aggregate: str = Field(
        server.MEAN, description="mean, or a rule that bad clients cannot take over: median, ..."
    )
    aggregate_options: dict[str, Number] = Field(
        default_factory=dict, description="of a robust rule: attackers=0.2 mixing=true"
    )


class RunConfig(Strict):
    """How long, from which seed, and what is recorded."""

    rounds: Count = Field(100, description="number of rounds (T)")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="all randomness follows it")
    eval_every: Count = Field(1, description="rounds between two evaluations on the test set")
    evaluate_on: Literal["test", "validation"] = Field(
        "test", description="validation: a tenth of the training set, held out of the federation"
    )
    test_samples: Size | None = Field(
        None, description="evaluate on so many test samples, drawn from the seed; none: on all"
    )
    record_step_sizes: bool = Field(False, description="keep every client's step sizes")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|(cuda|xpu|mps)(:\d+)?)$")] = Field(
        "auto", description="auto, cpu, cuda, cuda:1, xpu or mps"
    )
    checkpoint_seconds: Annotated[float, Field(ge=0)] = Field(
        5.0, description="at most this much of finished rounds is lost in a crash; 0: nothing"
    )


class EngineConfig(Strict):
    """Where client work runs. Only `fast` changes the result, and that by rounding."""

    kind: Literal["workers", "inline", "ray"] = Field(
        "workers", description="processes of one thread each, this process, or a Ray cluster"
    )
    workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="number of processes; 0: one a core"
    )
    address: str | None = Field(
        None, description="of a Ray cluster, auto or HOST:PORT; none: a local one"
    )
    fast: bool = Field(True, description="fused kernels, small clients stacked; false: plain torch")

    @model_validator(mode="after")
    def _address_is_of_a_cluster(self) -> Self:
        if self.address is None:
            return self
        if self.kind != "ray":
            raise UserError(f"engine.address {self.address!r} is of a Ray cluster: use kind ray")
        if not re.fullmatch(r"auto|[^\s/]+:\d{1,5}", self.address):
            raise UserError(f"engine.address {self.address!r} is neither auto nor HOST:PORT")
        return self


_ELSEWHERE: Any = {"engine": {"kind", "workers", "address"}, "run": {"checkpoint_seconds"}}
"""Fields that say where a run happens and how often it is saved: they change no result."""


class Config(Strict):
    """A whole experiment."""

    task: str = Field("digits-mlp", description="data set and model, as in fmnist-cnn")
    data_sha256: str | None = Field(None, description="fingerprint of data given in Python")
    federation: FederationConfig = FederationConfig()
    model: ModelConfig = ModelConfig()
    client: ClientConfig = ClientConfig()
    server: ServerConfig = ServerConfig()
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def dataset_name(self) -> str:
        """The first part of the task."""
        return self.task.partition("-")[0]

    @property
    def model_name(self) -> str:
        """The second part of the task."""
        return self.task.partition("-")[2]

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        if not self.model_name:
            raise UserError(f"task {self.task!r} is not DATASET-MODEL, as in digits-mlp")
        for kind, name, known in (
            ("data set", self.dataset_name, (*data.names(), OWN_DATA)),
            ("model", self.model_name, models.names()),
            ("server optimizer", self.server.optimizer, server.names()),
        ):
            if name not in known:
                raise unknown(kind, name, known)
        optim.lookup(self.client.optimizer)
        objective.build(self.client.objective, self.client.objective_options)
        server.Rule.read(self.server.aggregate, self.server.aggregate_options)
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the result: not where it runs, nor how often it is saved."""
        return self.model_dump(mode="json", exclude=_ELSEWHERE)

    @property
    def changes(self) -> dict[str, Any]:
        """The identity without what is as by default: a new field leaves old runs their names."""
        tree = self.model_dump(mode="json", exclude=_ELSEWHERE, exclude_defaults=True)
        return {name: value for name, value in tree.items() if value != {}}

    @property
    def fingerprint(self) -> str:
        """A short name for the identity alone, whichever version computes it."""
        return _short_hash(json.dumps(self.changes, sort_keys=True))

    @property
    def hash(self) -> str:
        """A short name for the identity, and for the version that computes it."""
        return _short_hash(f"{__version__} {json.dumps(self.changes, sort_keys=True)}")

    @property
    def run_name(self) -> str:
        """A folder name: readable first, then the hash that makes it unique."""
        federation = self.federation
        spread = "iid" if federation.partition == "iid" else f"a{federation.alpha:g}"
        optimizer = self.client.optimizer.replace(":", ".").rpartition(".")[2]
        return f"{self.task}-{spread}-{optimizer}-s{self.run.seed}-{self.hash}"

    def override(self, **changes: Any) -> Config:
        """Return a copy with dotted fields changed: `override(**{"run.seed": 1})`."""
        tree = self.model_dump()
        for path, value in changes.items():
            set_path(tree, path, value)
        return validated(Config, tree, "in the configuration")

    def to_toml(self) -> str:
        """Return the whole configuration as TOML; fields that are none are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


class RecordedConfig(Config):
    """A configuration as a run recorded it: names are shown, never looked up.

    To look an optimizer up would import it, and whoever only reads a configuration runs nobody's
    code.
    """

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        return self


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file into a tree that `validated` accepts."""
    try:
        return tomllib.loads(read_plain(path, LARGEST_TEXT).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"no configuration at {path}: give the path of a TOML file") from None
    except RecursionError:
        raise UserError(f"cannot read the configuration {path}: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, too long a number
        raise UserError(f"cannot read the configuration {path}: {error}") from None


def set_path(tree: dict[str, Any], path: str, value: object) -> None:
    """Set a dotted path in a nested dict, making the sections on the way."""
    *sections, key = path.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"{path}: {section!r} is a value, not a section")
        tree = inner
    tree[key] = value


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], tree: Mapping[str, Any], where: str) -> Model:
    """Build `model` from a tree, or say in one line what is wrong and where ("in x.toml")."""
    try:
        return model.model_validate(tree)
    except ValidationError as invalid:
        # A union reports every member that failed; the first error is the clearest.
        error = invalid.errors(include_url=False)[0]
    except RecursionError:
        raise UserError(f"the configuration {where} is nested too deeply") from None
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        known = list(_section(model, path[:-1]))
        near = get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise UserError(f"unknown key {brief('.'.join(path))} {where}: {hint}")
    while len(path) > 1 and path[-1] not in _section(model, path[:-1]):
        path.pop()  # the names of a union's members
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    raise UserError(f"{'.'.join(path)} {where} {message} (it is {brief(error['input'])})")


def _section(model: type[BaseModel], path: list[str]) -> Mapping[str, Any]:
    """Return the fields of a nested section, or nothing where the path leads to a value."""
    for name in path:
        inner = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return {}
        model = inner
    return model.model_fields
