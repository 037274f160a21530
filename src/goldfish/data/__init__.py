"""Data: where it comes from, who holds it, what is removed from it.

The functions that share a module's name are used through it: ``partition.partition`` and
``partition.split``, ``removal.split``, ``fetch.fetch``.
"""

from goldfish.data import fetch, partition, removal
from goldfish.data.augmentation import RandomCropFlip
from goldfish.data.backdoor import Backdoor, poison, triggered_test
from goldfish.data.datasets import DATASETS, FORMATS
from goldfish.data.examples import DatasetExamples, Subset, TensorExamples, as_examples
from goldfish.data.partition import Partition
from goldfish.data.sources import Availability, LabelledData, available, load, load_half

__all__ = [
    "DATASETS",
    "FORMATS",
    "Availability",
    "Backdoor",
    "DatasetExamples",
    "LabelledData",
    "Partition",
    "RandomCropFlip",
    "Subset",
    "TensorExamples",
    "as_examples",
    "available",
    "fetch",
    "load",
    "load_half",
    "partition",
    "poison",
    "removal",
    "triggered_test",
]
