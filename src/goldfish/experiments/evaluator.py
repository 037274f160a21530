"""Measures the models of a run: scores, backdoor, and what they remember of removed samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from goldfish.data import TensorExamples, removal
from goldfish.errors import DataError
from goldfish.evaluation.memory import Matched, class_matched, sample_hits, sample_losses
from goldfish.evaluation.scores import Scores, backdoor_success, score
from goldfish.experiments.scenario import Scenario, select
from goldfish.results import Final, Memory, TestImages
from goldfish.training.fit import predict
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import DeletionRequest, Examples, Params, Update


class Evaluator:
    """Measures models on the scenario's test data and removed samples."""

    def __init__(self, scenario: Scenario, device: str, *, of_clients: bool = False) -> None:
        self.scenario = scenario
        self._workspace = LocalWorkspace(scenario.model, device)
        removed = scenario.removed
        self.clean_removed = None if removed is None else chosen(removed, scenario.plain)
        """The removed samples that carry no trigger, if there are any to be seen here."""
        self._labels = scenario.test.labels.cpu()
        self.removed_classes = removed_classes(scenario)
        """Classes of removed samples that no remaining training sample has."""
        self._removed_classes = torch.tensor(self.removed_classes, dtype=torch.long)
        self._of_removed_class = torch.isin(self._labels, self._removed_classes)
        absent = torch.tensor(scenario.absent, dtype=torch.long)
        self._remaining = ~(self._of_removed_class | torch.isin(self._labels, absent))
        self._yardstick: tuple[Tensor, Tensor] | None = None
        """The losses of another model on removed samples and on test images."""
        self._of_clients = of_clients

    def logits(self, params: Params, examples: Examples) -> Tensor:
        """Return a model's logits."""
        return predict(self._workspace.load("evaluation", params).module, examples)

    def compare_with(self, params: Params) -> None:
        """Compare the memory of all models measured from now on with that of this one."""
        if self.clean_removed is not None:
            on_removed = self.logits(params, self.clean_removed)
            on_test = self.logits(params, self.scenario.test)
            self._yardstick = (
                sample_losses(on_removed, self.clean_removed.labels),
                sample_losses(on_test, self._labels),
            )

    def measure(
        self, params: Params, requests: Sequence[DeletionRequest] = (), *, compared: bool = True
    ) -> Final:
        """Return a model's scores; its memory is of what ``requests`` name, or of all of it.

        Without ``compared`` its memory is not compared with the yardstick's, as for itself.
        """
        scenario, labels = self.scenario, self._labels
        on_test = self.logits(params, scenario.test)
        gone, rest = self._of_removed_class, self._remaining
        scores = self.scores(on_test)
        found: dict[str, Any] = {}
        if bool(gone.any()):
            of_class = score(on_test[gone], labels[gone], scenario.num_classes)
            given = torch.isin(on_test[rest].argmax(dim=1), self._removed_classes)
            found["removed_class_accuracy"] = of_class.accuracy
            found["mistaken_for_removed"] = 100 * given.double().mean().item()
        if scenario.triggered is not None and scenario.backdoor is not None:
            target = scenario.backdoor.target
            triggered, clean = scenario.triggered, scenario.backdoor.eligible(labels)
            found["backdoor_success"] = backdoor_success(self.logits(params, triggered), target)
            found["without_trigger"] = backdoor_success(on_test[clean], target)
        if (memory := self._memory(params, on_test, requests, compared)) is not None:
            found |= {"memory": memory, "memory_gap": memory.gap.value}
            if (apart := memory.to_retrain) is not None:
                found["gap_to_retrain"] = apart.value
                found |= {"gap_to_retrain_low": apart.low, "gap_to_retrain_high": apart.high}
        return Final(
            accuracy=scores.accuracy,
            loss=scores.loss,
            mse=scores.mse,
            per_class=list(score(on_test, labels, scenario.num_classes).per_class),
            **found,
        )

    def scores(self, on_test: Tensor) -> Scores:
        """Return the scores of logits of the test set, on the classes that remain."""
        rest = self._remaining
        if not bool(rest.any()):
            raise DataError(
                "No test image is left to measure accuracy on: all of them are of classes that are "
                "removed, or that no client has. Add test images of the classes that remain."
            )
        return score(on_test[rest], self._labels[rest], self.scenario.num_classes)

    def client_accuracies(self, updates: Sequence[Update]) -> list[float]:
        """Return how many percent of the test images each client's own model gets right.

        A model whose predictions are no numbers gets none right.
        """
        if not self._of_clients:
            return []
        params = (update.params for update in updates if update.num_examples > 0)
        logits = (self.logits(model, self.scenario.test) for model in params)
        classes = self.scenario.num_classes
        return [
            score(said, self._labels, classes).accuracy if bool(said.isfinite().all()) else 0.0
            for said in logits
        ]

    def test_images(self) -> TestImages:
        """Return how many test images stand behind each percentage."""
        triggered, classes = self.scenario.triggered, self.scenario.num_classes
        return TestImages(
            accuracy=int(self._remaining.sum()),
            removed_class=int(self._of_removed_class.sum()),
            backdoor=0 if triggered is None else len(triggered),
            per_class=torch.bincount(self._labels, minlength=classes).tolist(),
        )

    def _memory(
        self, params: Params, on_test: Tensor, requests: Sequence[DeletionRequest], compared: bool
    ) -> Memory | None:
        """Compare the removed samples without a trigger that are asked for with unseen ones."""
        if self.clean_removed is None:
            return None
        on_removed = self.logits(params, self.clean_removed)
        labels = self.clean_removed.labels.cpu()
        asked = named(self.scenario, requests)[self.scenario.plain] if requests else slice(None)

        def matched(removed: Tensor, unseen: Tensor) -> Matched | None:
            return class_matched(removed[asked], labels[asked], unseen, self._labels)

        ours, theirs = sample_losses(on_removed, labels), sample_losses(on_test, self._labels)
        gap = matched(ours, theirs)
        right = matched(sample_hits(on_removed, labels), sample_hits(on_test, self._labels))
        if gap is None or right is None:
            return None
        base = self._yardstick if compared else None
        apart = base and matched(ours - base[0], theirs - base[1])
        return Memory(
            gap=gap.difference,
            to_retrain=apart and apart.difference,
            removed=gap.removed,
            unseen=gap.unseen,
            left_out=gap.left_out,
            removed_right=right.removed_mean,
            unseen_right=right.unseen_mean,
        )


def chosen(examples: TensorExamples, mask: Tensor) -> TensorExamples | None:
    """Return the examples that a mask marks; None where it marks none."""
    return select(examples, mask.nonzero().flatten()) if bool(mask.any()) else None


def removed_classes(scenario: Scenario) -> list[int]:
    """Return the classes of removed samples that no remaining training sample has.

    Where only clients know their samples, those that every client removes, or leaves with.
    """
    if scenario.removed is None:
        asked: dict[int | None, set[str]] = {}
        for request in scenario.requests:
            if request.sample_ids is None:
                asked.setdefault(request.class_label, set()).add(request.client_id)
        left = asked.pop(None, set())
        everyone = {client.id for client in scenario.clients}
        return sorted(c for c, own in asked.items() if c is not None and own | left >= everyone)
    gone = set(scenario.removed.ids)
    labels = {
        label
        for client in scenario.clients
        for sample_id, label in zip(
            client.retained.ids, client.retained.labels.tolist(), strict=True
        )
        if sample_id not in gone
    }
    return sorted(set(scenario.true_labels) - labels)


def named(scenario: Scenario, requests: Sequence[DeletionRequest]) -> Tensor:
    """Return which of the removed samples the requests name, one bool a sample."""
    by_id = removal.named_samples(requests)
    others = {(r.client_id, r.class_label) for r in requests if r.sample_ids is None}
    ids = () if scenario.removed is None else scenario.removed.ids
    samples = zip(ids, scenario.holders, scenario.true_labels, strict=True)
    found = [
        sample_id in by_id or (holder, label) in others or (holder, None) in others
        for sample_id, holder, label in samples
    ]
    return torch.tensor(found, dtype=torch.bool)
