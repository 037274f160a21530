"""What a run leaves as numbers, and the one table of what is measured.

The same classes write and read ``result.json``, ``samples.json`` and the lines of
``metrics.jsonl``. ``METRICS`` says of each number what it is called, how it is printed, whether it
is drawn, how its spread over seeds is told, and what it means: the report, the command line and
``--seeds`` walk that table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, model_validator

from goldfish.errors import StoreError

SCHEMA = 2
"""The version of ``result.json``."""
ORIGIN = "origin"
"""The model that was trained with the data in it."""
YARDSTICK = "retrain"
"""Trained from scratch without the removed data: what every method is measured against."""

Number: TypeAlias = int | float
"""A count; its mean over seeds need not be whole."""
MemoryFinding: TypeAlias = Literal["remembers", "over-forgets", "alike"]
DeletionKind: TypeAlias = Literal["samples", "class", "client"]
Unit: TypeAlias = Literal[
    "percent", "gap", "seconds", "bytes", "count", "factor", "probability", "number"
]


class Part(BaseModel):
    """A part of a result: never changed, never with a name that is not known, never NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    remedy: ClassVar[str] = "Write it anew with 'goldfish run {} --resume'."
    """What to do about a file of this part that cannot be used, in the folder {}."""

    __str__ = BaseModel.__repr__

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that holds this part as JSON; what is wrong with it is said in words."""
        remedy = cls.remedy.format(path.parent)
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise StoreError(f"There is no {path}. {remedy}") from None
        except OSError as error:
            raise StoreError(f"Cannot read {path} ({error}). Check its permissions.") from error
        except ValidationError as error:
            raise StoreError(f"{path} cannot be used: {in_words(error)}. {remedy}") from None


def in_words(error: ValidationError) -> str:
    """Return the first thing that is wrong with a file, and where."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"it is not valid JSON ({first['ctx']['error']})"
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")


class Margins(Part):
    """All margins by which numbers are judged, here and nowhere else."""

    accuracy: float = 0.5
    """Time to quality: points of accuracy that a method may stay below retrain's final one."""
    backdoor: float = 1.0
    """Time to quality: points that it may stay above retrain in what the trigger adds, and on a
    removed class."""
    memory: float = 0.02
    """A mean loss that differs by less counts as the same, however many samples there are."""
    gone: float = 0.05
    """What a test finds counts as gone when at most this share of it is left, where what it found
    before the deletion is the whole and what it finds in retrain (0 without a retrain) is none."""
    kept: float = 0.5
    """From this share on, the data counts as not gone."""
    signal: float = 10.0
    """Before the deletion a test must find so many points more than in retrain, or it proves
    nothing."""
    weak: float = 50.0
    """Below so many points of difference the backdoor took only in part: weak evidence."""
    noted: float = 5.0
    """From so many percent on it is told how often a model says what is looked for anyway."""
    collapse: float = 5.0
    """A method that loses so many points of accuracy against retrain (or origin) lost too much."""
    few_images: int = 1000
    """A percentage of fewer images is shown with its 95 % interval (Wilson's), and the margins of
    time to quality are twice as wide: see :meth:`for_images`."""

    def for_images(self, count: int) -> Margins:
        """Return the margins for so many test images.

        On few of them half a point is one or two images, and two retrained models differ by more.
        """
        if count >= self.few_images:
            return self
        wide = {"accuracy": 2 * self.accuracy, "backdoor": 2 * self.backdoor}
        return self.model_copy(update=wide)


MARGINS = Margins()


class Interval(Part):
    """A difference with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def finding(self) -> MemoryFinding:
        """What a difference of losses shows: of a memory gap to 0, or to another model's.

        Only what chance does not explain (0 is outside of the interval) and what is large enough
        to matter (:attr:`Margins.memory`) counts.
        """
        if self.low > 0 and self.value >= MARGINS.memory:
            return "remembers"
        if self.high < 0 and self.value <= -MARGINS.memory:
            return "over-forgets"
        return "alike"


class Memory(Part):
    """Removed samples without a trigger against unseen ones, in the same classes."""

    gap: Interval
    """Mean loss on the unseen ones minus that on the removed ones."""
    to_retrain: Interval | None = None
    """How far the gap lies above retrain's; None without a retrain."""
    removed: Number
    unseen: Number
    left_out: Number = 0
    """Removed samples whose class the test set does not have."""
    removed_right: float
    """Percent of the removed samples that get their label."""
    unseen_right: float

    @property
    def judged(self) -> Interval:
        """What the finding is about: the difference to retrain, or without one the gap."""
        return self.to_retrain or self.gap


class Measures(Part):
    """The scores of one model. Percentages are from 0 to 100; None: the run has no such test."""

    accuracy: float
    """On the clean test images of the classes that remain, as ``loss`` and ``mse``."""
    loss: float
    mse: float
    removed_class_accuracy: float | None = None
    """Accuracy on the classes that were removed."""
    mistaken_for_removed: float | None = None
    """How many images of the other classes get a removed class."""
    backdoor_success: float | None = None
    without_trigger: float | None = None
    """Backdoor success on the same images without the trigger."""
    memory_gap: float | None = None
    gap_to_retrain: float | None = None
    """How far the memory gap lies above retrain's, and the 95 % interval of that."""
    gap_to_retrain_low: float | None = None
    gap_to_retrain_high: float | None = None

    @property
    def trigger_adds(self) -> float | None:
        """Points of backdoor success that are due to the trigger."""
        if self.backdoor_success is None:
            return None
        return self.backdoor_success - (self.without_trigger or 0.0)

    @property
    def class_known(self) -> float | None:
        """Accuracy on the removed classes, less what others are taken for them."""
        if self.removed_class_accuracy is None:
            return None
        return self.removed_class_accuracy - (self.mistaken_for_removed or 0.0)

    @property
    def apart(self) -> Interval | None:
        """The difference of the memory gap to retrain's."""
        value, low, high = self.gap_to_retrain, self.gap_to_retrain_low, self.gap_to_retrain_high
        if value is None or low is None or high is None:
            return None
        return Interval(value=value, low=low, high=high)


class Final(Measures):
    """The scores of a model at the end: those of a round, and what is too long for every round."""

    per_class: list[float | None] = []
    """Accuracy on each class; None where the test set has none of it."""
    memory: Memory | None = None


class Cost(Part):
    """The cost of a round or of a whole run; costs add up with ``+``."""

    seconds: float = 0.0
    """Wall-clock time."""
    steps: Number = 0
    """Gradient steps, over all clients."""
    samples: Number = 0
    """Samples processed in those steps, over all clients."""
    bytes_sent: Number = 0
    """Bytes between server and clients, both ways."""
    bytes_kept: Number = 0
    """Bytes that must be kept for later rounds; a level, so costs add to its maximum."""
    teacher_samples: Number = 0
    """Samples that a teacher looked at, over all clients: forward passes beside the steps."""
    fisher_samples: Number = 0
    """Samples whose own gradients were squared, for the Fisher information of the steps."""
    measured_samples: Number = 0
    """Samples times models that were measured, for weights, stops or choices: test samples by the
    server, removed ones by clients."""

    def __add__(self, other: Cost) -> Cost:
        both = {name: getattr(self, name) + getattr(other, name) for name in Cost.model_fields}
        return Cost(**both | {"bytes_kept": max(self.bytes_kept, other.bytes_kept)})


class NoAnswer(Part):
    """A client that was asked in a round and did not answer, and why."""

    client_id: str
    error: str
    """The name of the exception."""
    cause: str


class Record(Measures, Cost):
    """One finished round: a line of ``metrics.jsonl``."""

    round: int
    """From 1 on; over all stages of a method."""
    stage: int = 1
    """How many times a deletion had been asked for by then."""
    failures: list[NoAnswer] = []
    absent: list[str] = []
    """Clients whose request the round should have served, and which were not there."""
    shortened: list[str] = []
    """Clients whose models were further from what they were sent than ``max_update_norm``."""
    history_bytes: Number = 0
    """Bytes of the updates that the server kept of this round."""
    client_accuracies: list[float] = []
    """Accuracy of each client's own model before the aggregation, where that was asked for."""
    std: dict[str, float] = {}
    """Of several seeds: the standard deviation of what is drawn over the rounds."""

    @property
    def cost(self) -> Cost:
        """What the round cost."""
        return Cost(**{name: getattr(self, name) for name in Cost.model_fields})


class Progress(Part):
    """Where a run is: a phase, its last finished round (0 at the start) and what it measured."""

    phase: str
    round: int
    rounds: int
    record: Record | None = None
    diverged: str | None = None
    """Why the phase ended early."""


class Similarity(Part):
    """How a model's predictions relate to those of others."""

    jsd: float | None = None
    """To retrain's, on the test data, as the next two."""
    jsd_distance: float | None = None
    l2: float | None = None
    t_test_p: float | None = None
    """Of the confidence in the removed samples' labels against that of the model before."""
    effect_size: float | None = None


class Spent(Part):
    """What a method had spent by the round in which it was first as good as retrain ended up."""

    round: Number
    seconds: float
    steps: Number
    samples: Number


class Spread(Part):
    """How one number of a method scatters over the seeds of a run."""

    mean: float | None
    std: float | None
    """Sample standard deviation."""
    values: list[float | None]
    """One a seed; None where that seed has no such number."""
    p_vs_retrain: float | None = None
    """Of the paired t-test over the seeds."""


class LostRequest(Part):
    """A request that a method did not carry out: its data is still in the model."""

    client_id: str
    kind: DeletionKind
    reason: str


class Training(Part):
    """The training of a method that does not begin from origin."""

    final: Final
    cost: Cost


class MethodResult(Part):
    """What one method, or the original training, ended with. Without ``final`` it diverged."""

    diverged: str | None = None
    """Why there is no model."""
    final: Final | None = None
    rounds: list[Record] = []
    similarity: Similarity = Similarity()
    cost: Cost | None = None
    quality_tested: bool = False
    """Whether time to quality could be told: never where origin itself would pass."""
    time_to_quality: Spent | None = None
    speed_up: float | None = None
    """Retrain's seconds to quality over this method's."""
    notes: list[str] = []
    not_honoured: list[LostRequest] = []
    training: Training | None = None
    spread: dict[str, Spread] = {}
    """By the keys of ``METRICS``; empty where the run had one seed."""

    @property
    def missed(self) -> bool:
        """Whether it was never as good as retrain (with several seeds: not in every one)."""
        return self.quality_tested and self.time_to_quality is None

    @property
    def seconds_to_quality(self) -> float | None:
        """The time of :attr:`time_to_quality`."""
        return None if self.time_to_quality is None else self.time_to_quality.seconds

    def get(self, key: str) -> float | None:
        """Return the number of ``METRICS`` with this key; None where there is none."""
        return BY_KEY[key].of(self)

    def std(self, key: str) -> float | None:
        """Return a number's standard deviation over the seeds; None where the run had one seed."""
        return self.spread[key].std if key in self.spread else None


class FiledRequest(Part):
    """One deletion request."""

    client_id: str
    kind: DeletionKind
    samples: int | None = None
    """How many samples it names; None where only its client can tell."""
    class_label: int | None = None


class Trigger(Part):
    """The trigger on removed samples."""

    target: int
    source: int | None = None
    size: int


class Deletion(Part):
    """What was asked for. None where only the clients can tell."""

    requests: list[FiledRequest] = []
    removed_samples: int | None = None
    clean_samples: int | None = None
    """Those of them that carry no trigger."""
    training_samples: int | None = None
    rate_percent: float | None = None
    removed_classes: list[int] = []
    """Classes that no remaining training sample has."""
    backdoor: Trigger | None = None


class Environment(Part):
    """Where a run was computed, and by what."""

    goldfish: str
    python: str
    torch: str
    platform: str
    cpu_count: int | None
    device: str
    vector_instructions: str
    threads: int
    workers: int
    client_threads: int
    compiled: bool = False
    """Whether the models were compiled, which may change the last bits."""
    machines_before: list[dict[str, str]] = []
    """Where the run was before it went on here."""


class Division(Part):
    """Who holds how many samples."""

    digest: str | None = None
    sizes: dict[str, int] = {}


class TestImages(Part):
    """How many test images stand behind each percentage."""

    accuracy: int = 0
    removed_class: int = 0
    backdoor: int = 0
    per_class: list[int] = []


class Result(Part):
    """The whole of ``result.json``."""

    schema_version: int = SCHEMA
    config: dict[str, JsonValue]
    """As in ``config.toml``; ``goldfish.experiments.config`` checks it."""
    environment: Environment
    partition: Division = Division()
    deletion: Deletion = Deletion()
    test_images: TestImages = TestImages()
    margins: Margins = MARGINS
    seeds: list[int] = []
    """Whose means the numbers are; empty for one run."""
    methods: dict[str, MethodResult]
    """Origin first, then the methods in the order of the configuration."""

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_version(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")  # noqa: TRY004 (pydantic wants it)
        found = values.get("schema_version", values.get("schema", SCHEMA))
        if found != SCHEMA:
            raise ValueError(f"it has schema {found!r}; this version of Goldfish reads {SCHEMA}")
        return values

    @property
    def origin(self) -> MethodResult:
        """The original training; without numbers where the run has none."""
        return self.methods.get(ORIGIN, MethodResult())

    @property
    def retrain(self) -> MethodResult:
        """The yardstick; without numbers where the run has none."""
        return self.methods.get(YARDSTICK, MethodResult())

    @property
    def subject(self) -> str | None:
        """The method that the reader asked for: the first one that is not the yardstick."""
        names = [name for name in self.methods if name != ORIGIN]
        return next((name for name in names if name != YARDSTICK), names[0] if names else None)

    def has(self, key: str) -> bool:
        """Tell whether any method has the number of ``METRICS`` with this key."""
        return any(method.get(key) is not None for method in self.methods.values())


class Prediction(Part):
    """What a model says of a sample."""

    label: int
    confidence: float


class Sample(Part):
    """A removed sample."""

    id: str
    client_id: str
    label: int
    """As it was trained."""
    true_label: int
    png: str
    """The picture, in base64."""
    predictions: dict[str, Prediction]
    """By method."""


class Samples(Part):
    """The whole of ``samples.json``: a few of the removed samples."""

    class_names: list[str] = []
    samples: list[Sample] = []


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    result: Result
    samples: Samples


def read_run(run_dir: Path) -> Run:
    """Read the files of a finished run; one of another version is refused in words."""
    path, samples = run_dir / "result.json", run_dir / "samples.json"
    if not run_dir.is_dir():
        raise StoreError(
            f"No run directory at {run_dir}. Check the path; 'goldfish run --out DIR' makes one."
        )
    if not path.exists():
        raise StoreError(
            f"No result.json in {run_dir}: the run has not finished. "
            f"Finish it with 'goldfish run {run_dir} --resume', then ask for the report again."
        )
    return Run(Result.read(path), Samples.read(samples) if samples.exists() else Samples())


@dataclass(frozen=True)
class Metric:
    """One number that is known of a method: a row of ``METRICS``."""

    path: str
    """Where it stands in :class:`MethodResult`; its last part is the metric's key."""
    label: str
    """The heading of its column on the page."""
    unit: Unit
    """How it is printed, and the axis on which it is drawn."""
    meaning: str
    """What it says, for the page; ``{margins}`` are those of the result."""
    title: str = ""
    """Its full name, for its chart, its bars and its explanation; by default the label."""
    main: bool = False
    """Whether its column is in the first table of the page, or under "More measures"."""
    short: str = ""
    """The heading of its column on a terminal, on two lines; empty: it has none there."""
    chart: bool = False
    """Whether it is drawn over the rounds: a field of :class:`Record` has its key then."""
    bars: bool = False
    """Whether it is shown as bars, under "What it cost"."""
    images: Literal["", "accuracy", "removed_class", "backdoor"] = ""
    """Of which test images a percentage is."""
    interval: str = ""
    """Where its 95 % interval stands, if it has one of its own."""
    spread: Literal["", "std", "paired"] = ""
    """Over seeds: the standard deviation; or that and a paired t-test against retrain."""

    @property
    def key(self) -> str:
        """Its name."""
        return self.path.rpartition(".")[2]

    @property
    def name(self) -> str:
        """Its full name."""
        return self.title or self.label[0].upper() + self.label[1:]

    def of(self, method: MethodResult) -> float | None:
        """Return a method's number; None where it has none."""
        value: float | None = follow(method, self.path)
        return value


def follow(part: Part, path: str) -> Any:
    """Return what stands at a path such as ``final.memory.gap``; None where a part is missing."""
    found: Any = part
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found


METRICS: Sequence[Metric] = (
    Metric(
        "final.accuracy",
        "accuracy",
        "percent",
        "Percent of the test images without a trigger that get their true label; where a class had "
        "to go, of the remaining classes. Of fewer than {margins.few_images} images the 95 % "
        "interval (Wilson’s) is given: where two overlap widely, models cannot be told apart.",
        title="Accuracy on clean test images",
        main=True,
        short="accuracy\n%",
        chart=True,
        images="accuracy",
        spread="paired",
    ),
    Metric(
        "final.removed_class_accuracy",
        "removed class",
        "percent",
        "Percent of the test images of the classes that had to go that still get their label. How "
        "many images of other classes get it too is subtracted before it is judged.",
        title="Accuracy on the removed class",
        main=True,
        short="removed\nclass %",
        chart=True,
        images="removed_class",
    ),
    Metric(
        "final.backdoor_success",
        "backdoor",
        "percent",
        "Removed samples carried a trigger and the attacker’s label: this is the percent of test "
        "images of other classes that get this label when the trigger is added. A model that never "
        "saw the removed samples stays near 0; how near, retrain tells. A model may give the label "
        "without the trigger too, as an untrained one does: only what the trigger adds counts.",
        title="Backdoor success",
        main=True,
        short="backdoor\n%",
        chart=True,
        images="backdoor",
        spread="paired",
    ),
    Metric(
        "final.memory_gap",
        "memory gap",
        "gap",
        "The mean loss on unseen test samples minus that on the removed samples without a trigger, "
        "each class weighing as much as among the removed ones (a class with fewer than two unseen "
        "samples is left out). A model’s loss is lower on what it was trained on: the gap is above "
        "0. Removed samples may also be easier or harder than unseen ones, which retrain’s gap "
        "tells; the 95 % interval of the difference to it comes from both models’ losses on the "
        "same samples. After each round only what had been asked for by then counts.",
        main=True,
        short="memory\ngap",
        chart=True,
        interval="final.memory.gap",
        spread="paired",
    ),
    Metric(
        "cost.seconds",
        "time",
        "seconds",
        "All the time that a method needs after the request, on this machine and under its load.",
        main=True,
        bars=True,
        spread="std",
    ),
    Metric(
        "seconds_to_quality",
        "to quality",
        "seconds",
        "What a method spends, from the last deletion on, until it is as good as retrain is at "
        "its end. Its accuracy may be lower by {margins.accuracy:g} in percentage points; what the "
        "trigger adds, and the accuracy on a removed class, may be higher by {margins.backdoor:g}; "
        "and the memory gap must not count as “remembers”. “Not reached”: in no round; “in 2 of 3 "
        "seeds”: not in all, so there is no mean. None is given where origin itself would pass.",
        title="Time to quality",
        main=True,
        short="time to\nquality",
        spread="std",
    ),
    Metric(
        "speed_up",
        "speed-up",
        "factor",
        "Retrain’s time to quality over the method’s: 3× is three times sooner, 0.5× takes twice "
        "as long, 1× is retrain itself.",
        main=True,
        short="speed-\nup",
    ),
    Metric(
        "similarity.t_test_p",
        "p-value vs origin",
        "probability",
        "Welch’s two-sided t-test of a model’s against origin’s (or its own training’s) confidence "
        "in the label that the removed samples were trained with. A small p says that the two "
        "models differ there. Many samples make any p small: read the effect size too.",
        title="p-value",
    ),
    Metric(
        "similarity.effect_size",
        "effect vs origin",
        "number",
        "Cohen’s d of the same two: by how many standard deviations they differ (huge where both "
        "models are equally sure of every sample).",
        title="Effect size",
    ),
    Metric(
        "cost.steps",
        "steps",
        "count",
        "Over all clients, after the request.",
        "Gradient steps",
        bars=True,
    ),
    Metric("cost.samples", "samples", "count", "", "Samples in gradient steps", bars=True),
    Metric(
        "cost.teacher_samples",
        "teacher samples",
        "count",
        "Samples that a teacher looked at on the clients, beside the gradient steps.",
    ),
    Metric(
        "cost.fisher_samples",
        "Fisher samples",
        "count",
        "Samples whose own gradients were squared for the Fisher information.",
    ),
    Metric(
        "cost.measured_samples",
        "measured samples",
        "count",
        "Samples times the models that were measured on them, for weights, stops or choices: the "
        "server’s test samples, and removed ones on the clients.",
    ),
    Metric(
        "cost.bytes_sent", "sent", "bytes", "Between server and clients.", "Bytes sent", bars=True
    ),
    Metric(
        "cost.bytes_kept",
        "kept",
        "bytes",
        "What had to be stored during the training, before anyone asked, so that the method can "
        "work: the clients’ updates, or checkpoints. 0 where it needs nothing but the model.",
        title="Bytes kept",
        main=True,
        short="kept",
        bars=True,
    ),
    Metric("final.loss", "test loss", "number", "Mean cross-entropy, natural logarithm."),
    Metric(
        "final.without_trigger",
        "target without trigger",
        "percent",
        "How often the images of the backdoor success get the attacker’s label without a trigger.",
    ),
    Metric("final.mse", "test MSE", "number", "Mean squared error of the predicted probabilities."),
    Metric(
        "similarity.jsd",
        "JSD to retrain",
        "number",
        "Jensen-Shannon divergence between the predictions of a model and of retrain, the mean "
        "over the test images, natural logarithm: 0 is the same, ln 2 = 0.693 nothing in common.",
    ),
    Metric("similarity.jsd_distance", "JSD distance", "number", "The square root of the JSD."),
    Metric(
        "similarity.l2",
        "L2 to retrain",
        "number",
        "Euclidean distance between the same predictions, the mean over the test images: from 0 "
        "to 1.414.",
    ),
)
"""Everything that is known of a method, in the order of the columns."""

BY_KEY: Mapping[str, Metric] = {metric.key: metric for metric in METRICS}
ACCURACY = BY_KEY["accuracy"]
