"""Verdicts by every test a run may have, and the headline: what the numbers say, good or bad."""

from __future__ import annotations

from typing import Any

import pytest

from goldfish.report.page import notes
from goldfish.report.top import Headline, asked_sentence, headline
from goldfish.report.verdict import Verdict, verdicts
from goldfish.results import Result

Made = dict[str, Any]


def judged(result: Made, name: str = "goldfish") -> Verdict:
    return verdicts(Result.model_validate(result))[name]


def told(result: Made) -> Headline:
    return headline(Result.model_validate(result))


def text(result: Made) -> str:
    found = told(result)
    return " ".join([found.verdict, found.asked, *found.sentences])


def set_success(result: Made, **values: float) -> Made:
    for name, value in values.items():
        result["methods"][name]["final"]["backdoor_success"] = value
    return result


@pytest.mark.parametrize(
    ("goldfish", "half", "status", "short", "title"),
    [
        (0.08, 0.01, "kept", "remembers", "Not gone: goldfish remembers the removed samples"),
        (0.03, 0.01, "partly", "remembers in part", "Partly gone: goldfish still remembers"),
        (-0.05, 0.01, "partly", "over-forgets", "goldfish over-forgets: it treats the removed"),
        (0.01, 0.005, "gone", "like unseen", "Gone, as far as the losses of 144 removed"),
        (0.01, 0.034, "gone", "like unseen", "Gone, as far as the losses of 144 removed"),
        (0.01, 0.036, "unclear", "cannot be told", "No verdict: too little to tell removed"),
    ],
)
def test_losses_alone(
    make_result: Any,
    remember: Any,
    goldfish: float,
    half: float,
    status: str,
    short: str,
    title: str,
) -> None:
    """Origin's gap lies 0.09 above retrain's. The last interval reaches 0.046, more than half."""
    result = make_result(backdoor=False)
    remember(result, "origin", 0.09, 0.09)
    remember(result, "goldfish", goldfish, goldfish, half)
    found = judged(result)
    assert (found.status, found.short) == (status, short)
    assert found.title.startswith(title)


def test_losses_in_words(make_result: Any, remember: Any) -> None:
    result = make_result(backdoor=False)
    remember(result, "origin", 0.09, 0.09)
    remember(result, "goldfish", 0.02, 0.03)
    remember(result, "retrain", -0.01)
    first, second, *_ = judged(result).sentences
    assert first == (
        "Memory gap of goldfish: 0.020, 95 % interval 0.010 to 0.030, from 144 removed samples (3 "
        "more are of classes that the test set lacks) and 359 unseen ones, class by class; it gets "
        "99.3 % of the removed ones right and 97.2 % of the unseen ones."
    )
    assert second == (
        "Against retrain, whose gap is −0.010, the difference is 0.030, 95 % interval 0.020 to "
        "0.040: with a margin of 0.02, goldfish remembers them."
    )


def test_without_retrain_a_gap_is_compared_with_0(make_result: Any, remember: Any) -> None:
    result = make_result(["origin", "goldfish"], backdoor=False)
    remember(result, "origin", 0.09)
    remember(result, "goldfish", 0.08)
    found = judged(result)
    assert found.status == "kept"
    assert "Against 0, with a margin of 0.02, goldfish remembers them; the run has no retrain" in (
        " ".join(found.sentences)
    )


def test_few_samples_tell_little(make_result: Any, remember: Any) -> None:
    """Origin itself, trained on the samples, cannot be told apart: nobody passes the test."""
    result = make_result(backdoor=False)
    remember(result, "origin", 0.09, 0.09, 0.2)
    remember(result, "goldfish", 0.01, 0.01, 0.2)
    found = judged(result)
    assert found.status == "unclear"
    assert (
        "origin, which was trained on them, cannot be told apart either (0.090, 95 % interval"
        in (" ".join(found.sentences))
    )
    assert "It takes more removed samples, or a larger test set." in " ".join(found.sentences)


@pytest.mark.parametrize(
    ("success", "memory", "status", "title"),
    [
        (0.6, 0.0, "gone", "Gone, as far as the backdoor test and the losses of 144 removed"),
        (0.6, 0.08, "kept", "Not gone: goldfish remembers the removed samples without a trigger"),
        (0.6, -0.08, "partly", "goldfish over-forgets"),
        (30.0, 0.0, "partly", "Partly gone: some of the backdoor is left"),
        (30.0, 0.08, "kept", "Not gone: goldfish remembers"),
        (90.0, 0.0, "kept", "Not gone: the backdoor still works"),
    ],
)
def test_the_worse_finding_leads(
    make_result: Any, remember: Any, success: float, memory: float, status: str, title: str
) -> None:
    result = make_result()
    result["methods"]["goldfish"]["final"]["backdoor_success"] = success
    remember(result, "origin", 0.09, 0.09)
    remember(result, "goldfish", memory, memory)
    found = judged(result)
    assert found.status == status
    assert found.title.startswith(title)


def test_a_model_that_always_says_the_target_has_no_backdoor(make_result: Any) -> None:
    """Origin gives the target to all images, with the trigger or without: the trigger adds 0."""
    result = make_result()
    for name, success, without in (
        ("origin", 100.0, 100.0),
        ("goldfish", 0.0, 0.0),
        ("retrain", 0.0, 0.0),
    ):
        final = {"backdoor_success": success, "without_trigger": without}
        result["methods"][name]["final"] |= final
    found = judged(result)
    assert (found.status, found.title) == ("unclear", "No verdict: the backdoor never took")
    assert "Without the trigger 100.0 % (origin), 0.0 % (goldfish) and 0.0 % (retrain)" in (
        " ".join(found.sentences)
    )


def test_what_the_trigger_adds_is_judged(make_result: Any) -> None:
    """40 % with the trigger and 39 % without: the backdoor is gone, whatever else is wrong."""
    result = make_result()
    result["methods"]["goldfish"]["final"] |= {"backdoor_success": 40.0, "without_trigger": 39.0}
    assert judged(result).status == "gone"
    result["methods"]["goldfish"]["final"]["without_trigger"] = None
    assert judged(result).status == "partly"


@pytest.mark.parametrize("backdoor", [True, False])
@pytest.mark.parametrize("memory", [0.0, 0.08, None])
def test_a_collapsed_model_passes_no_test(
    make_result: Any, remember: Any, backdoor: bool, memory: float | None
) -> None:
    """71.7 % against retrain's 95.1 %."""
    result = make_result(backdoor=backdoor)
    result["methods"]["goldfish"]["final"]["accuracy"] = 71.7
    if memory is not None:
        remember(result, "origin", 0.09, 0.09)
        remember(result, "goldfish", memory, memory)
    found = judged(result)
    assert found.status == ("kept" if memory else "partly")
    assert found.title.endswith("; much of the accuracy is lost")
    assert found.short.endswith(", accuracy lost")
    assert "23.4 points less accurate than retrain" in found.sentences[0]


def test_without_retrain_accuracy_is_held_against_origin(make_result: Any) -> None:
    result = make_result(["origin", "goldfish"], backdoor=False)
    result["methods"]["goldfish"]["final"]["accuracy"] = 71.7
    assert "24.1 points less accurate than origin" in judged(result).sentences[0]


@pytest.mark.parametrize(
    ("origin", "goldfish", "status", "short"),
    [
        (97.0, 0.0, "gone", "class gone"),
        (97.0, 30.0, "partly", "class in part"),
        (97.0, 95.0, "kept", "class known"),
        (5.0, 0.0, "unclear", "no verdict"),
    ],
)
def test_a_removed_class(
    make_result: Any, origin: float, goldfish: float, status: str, short: str
) -> None:
    result = make_result(backdoor=False)
    result["deletion"]["removed_classes"] = [4]
    result["test_images"] = {"accuracy": 323, "removed_class": 36}
    for name, value in (("origin", origin), ("goldfish", goldfish), ("retrain", 0.0)):
        result["methods"][name]["final"]["removed_class_accuracy"] = value
    found = judged(result)
    assert (found.status, found.short) == (status, short)
    assert "Accuracy on the removed class 4 (36 test images) fell" in found.sentences[0]
    accuracy = "Accuracy on 323 clean test images of the remaining classes, with 95 % intervals: "
    assert any(text.startswith(accuracy) for text in told(result).sentences)


def test_a_model_that_takes_everything_for_the_removed_class_does_not_know_it(
    make_result: Any,
) -> None:
    result = make_result(backdoor=False)
    result["deletion"]["removed_classes"] = [4]
    for name, value in (("origin", 100.0), ("goldfish", 0.0), ("retrain", 0.0)):
        known = {"removed_class_accuracy": value, "mistaken_for_removed": value}
        result["methods"][name]["final"] |= known
    found = judged(result)
    assert (found.status, found.title) == (
        "unclear",
        "No verdict: origin hardly knew the removed class 4",
    )
    assert (
        "100.0 % (origin), 0.0 % (goldfish) and 0.0 % (retrain) are taken for it too"
        in (found.sentences[1])
    )


FAILED = {"client_id": "client-1", "kind": "samples", "reason": "took part in 0 of 5 rounds"}


def test_what_was_not_honoured_comes_first(make_result: Any) -> None:
    """Whatever the tests find: here they find the backdoor gone."""
    result = make_result()
    result["methods"]["goldfish"]["not_honoured"] = [FAILED]
    found = told(result)
    assert (found.status, found.verdict) == ("kept", "Not honoured: the request of client-1")
    sentence = (
        "Not honoured by goldfish: the request of client-1 to remove samples (took part in 0 of 5 "
        "rounds)."
    )
    assert found.sentences[0] == sentence
    assert "Backdoor success fell" in found.sentences[1]
    assert ("goldfish", sentence) in notes(Result.model_validate(result))


def test_others_that_did_not_honour_a_request_are_named(make_result: Any) -> None:
    result = make_result(["origin", "goldfish", "retrain", "sisa"])
    result["methods"]["sisa"] |= {"not_honoured": [FAILED | {"kind": "client"}]}
    sentences = told(result).sentences
    assert told(result).status == "gone"
    assert (
        "Not honoured by sisa: the request of client-1 to remove all of its data (took part in 0 "
        "of 5 rounds)."
    ) in sentences
    assert "Verdicts on the other methods: sisa: not honoured." in sentences


def test_a_gap_beyond_origins_is_flagged(make_result: Any, remember: Any) -> None:
    """Fed-recovery 0.194, origin 0.085; goldfish's 0.104 is less than the margin above it."""
    result = make_result(["origin", "goldfish", "retrain", "fed-recovery"], backdoor=False)
    for name, gap in (("origin", 0.085), ("goldfish", 0.104), ("fed-recovery", 0.194)):
        remember(result, name, gap, gap)
    sentence = (
        "The memory gap of fed-recovery (0.194) exceeds that of origin (0.085), which was trained "
        "on the removed samples."
    )
    assert sentence in told(result).sentences
    assert notes(Result.model_validate(result)) == [("fed-recovery", sentence)]


def test_a_method_with_a_training_of_its_own_is_held_against_that(make_result: Any) -> None:
    """The others outvote sisa's poisoned client from the start: its backdoor never took."""
    result = make_result(["origin", "sisa", "retrain"])
    own = result["methods"]["sisa"]
    trained = own["final"] | {"backdoor_success": 3.0, "without_trigger": 0.1}
    own["training"] = {"final": trained, "cost": {}}
    found = judged(result, "sisa")
    assert (found.status, found.title) == ("unclear", "No verdict: the backdoor never took")
    assert "from 3.0 % (sisa's own training) to 0.4 % (sisa)" in found.sentences[0]


def test_the_yardstick_has_a_verdict_of_its_own(make_result: Any, remember: Any) -> None:
    result = make_result(["origin", "retrain"], backdoor=False)
    remember(result, "retrain", 0.09)
    found = judged(result, "retrain")
    assert (found.status, found.short) == ("gone", "yardstick")
    assert "they are easier or harder than unseen ones" in found.sentences[-1]


@pytest.mark.parametrize("success", [0.3, 30.0, 99.0])
def test_no_test_accuses_the_yardstick(make_result: Any, success: float) -> None:
    """It never saw the removed data: what the trigger does in it, other data taught."""
    result = set_success(make_result(), origin=99.6, goldfish=1.0, retrain=success)
    found = judged(result, "retrain")
    assert (found.status, found.short) == ("gone", "yardstick")
    assert len(found.sentences) == 1
    assert "it is the yardstick itself" in found.sentences[0]
    result["methods"]["retrain"]["final"]["accuracy"] = 60.0
    short = judged(result, "retrain")
    assert (short.status, short.short) == ("gone", "yardstick, accuracy lost")
    assert "it was trained too short, or the removed data taught that much" in short.sentences[0]


@pytest.mark.parametrize(
    ("deletion", "words"),
    [
        ({"clean_samples": 12}, "it takes a test set with some of each class"),
        ({"removed_samples": None, "clean_samples": None}, "are with their clients alone"),
    ],
)
def test_what_it_would_take(make_result: Any, deletion: Made, words: str) -> None:
    result = make_result(["origin", "goldfish"], backdoor=False)
    result["deletion"] |= deletion
    found = judged(result)
    assert found.status == "unclear"
    assert words in found.sentences[0]
    assert "add it to unlearning.methods" in found.sentences[1]


def test_every_method_has_a_short_verdict(make_grown: Any) -> None:
    found = verdicts(Result.model_validate(make_grown()))
    assert len(found) == 10
    assert all(verdict.short for verdict in found.values())
    assert found["fed-recovery"].short == "backdoor works, remembers, accuracy lost"


def test_gone(make_result: Any) -> None:
    found = told(make_result())
    assert found.status == "gone"
    assert found.asked == "Asked: remove 107 samples (7.4 % of the training data) of client-1."
    assert found.sentences[0] == (
        "Backdoor success fell from 99.6 % (origin) to 0.6 % (goldfish); "
        "retraining from scratch gives 0.3 %."
    )
    accuracy = "95.8 % (origin), 95.5 % (goldfish), 95.1 % (retrain)"
    assert f"Accuracy on 10,000 clean test images: {accuracy}." in found.sentences


@pytest.mark.parametrize(
    ("origin", "goldfish", "retrain", "status", "words"),
    [
        (99.6, 5.2, 0.3, "gone", "fell from 99.6 %"),  # 4.9 % of the way is left
        (99.6, 5.4, 0.3, "partly", "fell from 99.6 %"),  # 5.1 %
        (99.6, 49.0, 0.3, "partly", "Part of what the removed data taught is still there"),
        (99.6, 90.0, 0.3, "kept", "fell only from 99.6 % (origin) to 90.0 % (goldfish)"),
        (90.0, 95.0, 0.3, "kept", "did not fall: it went from 90.0 % (origin) to 95.0 %"),
        (90.0, 90.0, 0.3, "kept", "did not fall: it is 90.0 % in origin and in goldfish"),
        (8.0, 1.0, 0.3, "unclear", "the backdoor never took"),
        (10.2, 0.3, 0.3, "unclear", "the backdoor never took"),  # 9.9 points
        (10.4, 0.3, 0.3, "gone", "as far as a weak backdoor can show"),  # 10.1 points
        (12.7, 0.0, 0.0, "gone", "Weak evidence: in origin the trigger adds only 12.7 points more"),
        (50.4, 0.3, 0.3, "gone", "as far as the backdoor test can show"),  # 50.1 points
        (50.0, 45.0, 45.0, "unclear", "this test cannot tell"),
        (20.0, 1.0, 40.0, "unclear", "this test cannot tell"),  # retrain has more than origin
    ],
)
def test_backdoor(
    make_result: Any, origin: float, goldfish: float, retrain: float, status: str, words: str
) -> None:
    result = set_success(make_result(), origin=origin, goldfish=goldfish, retrain=retrain)
    assert told(result).status == status
    assert words in text(result)


@pytest.mark.parametrize(("accuracy", "status"), [(90.2, "gone"), (90.0, "partly")])
def test_five_points_of_accuracy_may_go(make_result: Any, accuracy: float, status: str) -> None:
    """Retrain has 95.1 %."""
    result = make_result()
    result["methods"]["goldfish"]["final"]["accuracy"] = accuracy
    assert told(result).status == status


def test_cost_names_rounds_only_where_they_differ(make_result: Any) -> None:
    result = make_result()
    steps = (
        "goldfish took 5.89 s and 285 gradient steps; retrain took 15.5 s and 750 gradient steps."
    )
    assert steps in told(result).sentences
    del result["methods"]["goldfish"]["rounds"][6:]
    assert (
        "goldfish took 5.89 s and 285 gradient steps in 6 rounds; "
        "retrain took 15.5 s and 750 gradient steps in 10 rounds."
    ) in told(result).sentences


def test_no_retrain(make_result: Any) -> None:
    found = told(make_result(["origin", "goldfish"]))
    assert found.status == "gone"
    assert "The run has no retrain" in found.sentences[0]


def test_retrain_diverged(make_result: Any) -> None:
    result = make_result()
    result["methods"]["retrain"] = {"diverged": "non-finite loss in round 2", "rounds": []}
    assert "retrain gave no model to compare with" in text(result)
    assert "retrain diverged: non-finite loss in round 2." in text(result)


def test_goldfish_diverged(make_result: Any) -> None:
    result = make_result()
    result["methods"]["goldfish"] = {"diverged": "non-finite loss on client-1", "rounds": []}
    assert told(result).status == "unclear"
    assert "goldfish diverged and gives no model: non-finite loss on client-1." in text(result)


def test_no_test_at_all(make_result: Any) -> None:
    result = make_result(backdoor=False)
    assert told(result).status == "unclear"
    assert told(result).verdict == "No verdict: nothing to test"
    assert "with their clients alone" in text(result)
    assert "closer to retrain's than origin's are (JSD 0.0234 against 0.0627)" in text(result)
    assert "no retrain to compare with" in text(make_result(["origin", "goldfish"], backdoor=False))


def test_only_retrain_and_only_origin(make_result: Any) -> None:
    found = told(make_result(["origin", "retrain"]))
    assert found.status == "gone"
    assert "it is the yardstick itself" in found.sentences[0]
    assert told(make_result(["origin"])).status == "unclear"


def test_the_method_that_the_reader_asked_for_leads(make_result: Any) -> None:
    assert "4.1 % (rapid-retrain)" in text(make_result(["origin", "retrain", "rapid-retrain"]))
    result = make_result(["origin", "fed-recovery", "goldfish", "retrain"])
    assert told(result).verdict.startswith("Not gone: the backdoor still works")
    assert "fell only from 99.6 % (origin) to 61.0 % (fed-recovery)" in text(result)
    assert "Verdicts on the other methods: goldfish: backdoor gone." in text(result)


def test_other_methods_and_notes_are_named(make_result: Any) -> None:
    result = make_result(["origin", "goldfish", "retrain", "sisa", "fed-recovery"])
    result["methods"]["goldfish"]["notes"] = ["shards were shared: this is not exact"]
    assert "Backdoor success of the other methods: sisa 0.4 % and fed-recovery 61.0 %." in text(
        result
    )
    assert "shards were shared: this is not exact." in told(result).sentences


@pytest.mark.parametrize(
    ("kind", "clients", "expected"),
    [
        ("client", ["a"], "Asked: remove everything that a contributed, 107 samples (7.4 % of"),
        ("class", ["a", "b"], "Asked: remove class 3 from the data of a and b, 107 samples"),
        ("samples", ["a", "b", "c"], "training data) of a, b and c."),
        ("samples", list("abcde"), "training data) of 5 clients."),
        ("samples", [], "Asked: nothing"),
    ],
)
def test_asked(make_result: Any, kind: str, clients: list[str], expected: str) -> None:
    result = make_result()
    label = 3 if kind == "class" else None
    result["deletion"]["requests"] = [
        {"client_id": c, "samples": 9, "kind": kind, "class_label": label} for c in clients
    ]
    assert expected in asked_sentence(Result.model_validate(result))


@pytest.mark.parametrize(
    ("speed_up", "words"),
    [
        (3.21, "goldfish reached retrain's quality 3.2 times sooner than retrain itself (4.12 s"),
        (0.25, "goldfish reached retrain's quality 4.0 times later than retrain itself (4.12 s"),
        (1.02, "goldfish reached retrain's quality about as soon as retrain itself"),
        (0.98, "goldfish reached retrain's quality about as soon as retrain itself"),
    ],
)
def test_speed_up(make_grown: Any, speed_up: float, words: str) -> None:
    result = make_grown()
    result["methods"]["goldfish"]["speed_up"] = speed_up
    assert words in text(result)


def test_quality_not_reached(make_grown: Any) -> None:
    result = make_grown(["origin", "retrain", "rapid-retrain"])
    assert "rapid-retrain did not reach retrain's quality in its 10 rounds." in text(result)
    result = make_grown(["origin", "retrain", "rapid-retrain"], seeds=3)
    assert "rapid-retrain reached retrain's quality in 2 of 3 seeds only." in text(result)
    assert "All numbers are means over 3 seeds." in text(result)
    for entry in result["methods"].values():
        entry["spread"]["seconds_to_quality"]["values"][0] = None  # origin passed with this seed
    said = text(result)
    assert "rapid-retrain reached retrain's quality in 1 of 2 seeds that can tell it only." in said
    assert "quality" not in text(make_grown(["origin", "retrain"]))
