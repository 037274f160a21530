"""What an audit leaves as numbers: the classes that write and read ``audit.json``.

They need no PyTorch, so that the report reads them at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from goldfish.results import Part

AUDIT = "audit.json"
"""The file in the run directory."""

Tier: TypeAlias = Literal["quick", "standard", "full"]
AuditWord: TypeAlias = Literal[
    "remembers", "over-forgets", "damaged", "different", "indistinguishable", "not enough evidence"
]


class Rate(Part):
    """A share with its 95 % interval, all from 0 to 1."""

    rate: float
    low: float
    high: float
    count: int
    """Of how many."""


class Difference(Part):
    """Unlearned models minus oracles in one number a model, with its 99 % interval."""

    value: float
    low: float
    high: float
    unlearned: int
    """How many models unlearned."""
    oracles: int
    of_samples: float = 0.0
    """Half of the interval that the samples alone would give, however many models there are."""

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


class AuditVerdict(Part):
    """What an audit shows. Never a certificate: it says what these tests could not tell apart."""

    word: AuditWord
    sentence: str
    memory: Difference | None = None
    """Shift of the margins on removed samples, beyond that on unseen ones: above 0, a memory."""
    general: Difference | None = None
    """Shift of the margins on unseen samples: below 0, less sure of everything."""
    accuracy: Difference | None = None
    """In points, on the test set."""
    before: Difference | None = None
    """The memory of origin: what there was to forget."""
    models: list[float] = Field(default_factory=list)
    """Each unlearned model's own shift, whose mean is :attr:`memory`."""
    oracles: list[float] = Field(default_factory=list)
    """The same of each oracle, compared with the other oracles: the noise."""


class Distances(Part):
    """Median distance of margins between two groups of models, on two kinds of samples."""

    removed: float
    unseen: float


class Epsilon(Part):
    """The epsilon of the NeurIPS 2023 challenge at delta 1e-5, over the removed samples."""

    median: float | None
    """None where it is infinite: the models of the two sides do not overlap for most samples."""
    separated: int
    """For how many samples the two sides do not overlap at all."""
    samples: int


class Attack(Part):
    """U-LiRA: tells, from a model's margin on a removed sample, that it unlearned the sample."""

    at_1_percent: Rate
    """True positive rate at a false positive rate of 1 %, over all models and samples."""
    at_01_percent: Rate
    """The same at 0.1 %."""
    roc: list[tuple[float, float]]
    """False and true positive rates, the false ones evenly spaced on a logarithmic axis."""
    epsilon: Epsilon | None = None
    """In the full tier."""


class AuditedMethod(AuditVerdict):
    """What many models of one method show beside the oracles."""

    distances: Distances | None = None
    """From the oracles, with half of the models a side, as in :attr:`Audit.noise`; None where there
    is one model of the method."""
    klom: Distances | None = None
    """The binned distance, in the full tier with 200 models or more: 100 in each half."""
    attack: Attack | None = None
    """None where there is one model of the method."""


class Relearning(Part):
    """How fast a model learns the removed samples again."""

    curve: list[float]
    """Mean loss on the removed samples after 0, 1, 2, ... steps, the mean over all orders."""
    steps: list[int | None]
    """For each order of the samples: after how many steps they fit as in origin; None: never."""


class ClientHarm(Part):
    """Accuracy on the remaining samples of one client, in percent."""

    before: float
    after: float
    samples: int


class AffectedSample(Part):
    """A remaining sample, and its margin before and after unlearning."""

    id: str
    client_id: str
    label: int
    before: float
    after: float


class Harm(Part):
    """What unlearning did to remaining samples: origin before, the method's model after."""

    clients: dict[str, ClientHarm]
    lost: int
    """Samples that were right before and are wrong after."""
    gained: int
    """The other way round."""
    samples: int
    """How many remaining samples were looked at."""
    most_affected: list[AffectedSample]
    """Those whose margin fell most."""


class QuickAudit(Part):
    """What the one model of a run shows, without any other model but retrain's."""

    membership: Rate | None = None
    """The probability that a removed sample has a larger margin than an unseen one of its class:
    0.5 is chance."""
    canaries: Rate | None = None
    """How many of the canaries still get the wrong label that they were trained with."""
    relearning: Relearning | None = None
    """None where only the clients have the removed samples: they do not train on them again."""
    harm: Harm | None = None
    """None for origin."""


class Audit(Part):
    """The whole of ``audit.json``."""

    tier: Tier
    removed: int
    """How many removed samples were compared."""
    unseen: int
    """With how many unseen ones."""
    relearned: int
    """How many removed samples were learned again."""
    quick: dict[str, QuickAudit]
    """By method; origin, which unlearned nothing, comes first."""
    models: int = 0
    """How many oracles, and models of each method (but one where only the clients have the removed
    samples); 0 in the quick tier."""
    noise: Distances | None = None
    """Between one half of the oracles and the other."""
    noise_klom: Distances | None = None
    band: float = 0.0
    """A further oracle's shift is expected within this distance of 0 (99 %)."""
    methods: dict[str, AuditedMethod] = Field(default_factory=dict)
    """What many models of each show; empty in the quick tier."""
    notes: list[str] = Field(default_factory=list)
    """What could not be looked at, and why."""

    remedy: ClassVar[str] = "Write it anew with 'goldfish audit {}'."


def read_audit(run_dir: Path) -> Audit | None:
    """Read the audit of a run; None where there was none."""
    path = run_dir / AUDIT
    return Audit.read(path) if path.exists() else None
