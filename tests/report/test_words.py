"""The headline says what the numbers say, also when they are not what one hoped for."""

from __future__ import annotations

from typing import Any

import pytest

from goldfish.report.words import asked_sentence, headline


def set_success(result: dict[str, Any], **values: float) -> dict[str, Any]:
    for name, value in values.items():
        result["methods"][name]["final"]["backdoor_success"] = value
    return result


def text(result: dict[str, Any]) -> str:
    found = headline(result)
    return " ".join([found.verdict, found.asked, *found.sentences])


def test_gone(make_result: Any) -> None:
    found = headline(make_result())
    assert found.status == "gone"
    assert found.asked == "Asked: remove 107 samples (7.4 % of the training data) of client-1."
    assert found.sentences[0] == (
        "Backdoor success fell from 99.6 % (origin) to 0.6 % (goldfish); "
        "retraining from scratch gives 0.3 %."
    )
    accuracy = "Accuracy on clean test images: 95.8 % (origin), 95.5 % (goldfish), 95.1 % (retrain)"
    assert f"{accuracy}." in found.sentences


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
    assert headline(result).status == status
    assert words in text(result)


def test_a_ruined_model_is_no_success(make_result: Any) -> None:
    result = make_result()
    result["methods"]["goldfish"]["final"]["accuracy"] = 10.0
    assert headline(result).status == "partly"
    assert "85.1 points less accurate than retrain" in text(result)


@pytest.mark.parametrize(("accuracy", "status"), [(90.2, "gone"), (90.0, "partly")])
def test_five_points_of_accuracy_may_go(make_result: Any, accuracy: float, status: str) -> None:
    """Retrain has 95.1 %."""
    result = make_result()
    result["methods"]["goldfish"]["final"]["accuracy"] = accuracy
    assert headline(result).status == status


def test_cost_names_rounds_only_where_they_differ(make_result: Any) -> None:
    result = make_result()
    steps = (
        "goldfish took 5.89 s and 285 gradient steps; retrain took 15.5 s and 750 gradient steps."
    )
    assert steps in headline(result).sentences
    del result["methods"]["goldfish"]["rounds"][6:]
    assert (
        "goldfish took 5.89 s and 285 gradient steps in 6 rounds; "
        "retrain took 15.5 s and 750 gradient steps in 10 rounds."
    ) in headline(result).sentences


def test_no_retrain(make_result: Any) -> None:
    found = headline(make_result(["origin", "goldfish"]))
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
    assert headline(result).status == "unclear"
    assert "goldfish diverged and gives no model: non-finite loss on client-1." in text(result)


def test_no_test_at_all(make_result: Any) -> None:
    result = make_result(backdoor=False)
    assert headline(result).status == "unclear"
    assert headline(result).verdict == "No verdict: nothing to test"
    assert "carried no backdoor" in text(result)
    assert "closer to retrain's than origin's are (JSD 0.0234 against 0.0627)" in text(result)
    result["methods"]["origin"]["similarity"]["jsd"] = None
    assert "differ from retrain's by a JSD of 0.0234" in text(result)
    assert "no retrain to compare with" in text(make_result(["origin", "goldfish"], backdoor=False))


def test_only_retrain_and_only_origin(make_result: Any) -> None:
    found = headline(make_result(["origin", "retrain"]))
    assert found.status == "gone"
    assert "it is the yardstick itself" in found.sentences[0]
    assert headline(make_result(["origin"])).status == "unclear"


def test_the_method_that_the_reader_asked_for_leads(make_result: Any) -> None:
    assert "4.1 % (rapid-retrain)" in text(make_result(["origin", "retrain", "rapid-retrain"]))
    result = make_result(["origin", "fed-recovery", "goldfish", "retrain"])
    assert headline(result).verdict.startswith("Not gone: the backdoor still works")
    assert "fell only from 99.6 % (origin) to 61.0 % (fed-recovery)" in text(result)
    assert "Verdicts on the other methods: goldfish: backdoor gone." in text(result)


def test_other_methods_and_notes_are_named(make_result: Any) -> None:
    result = make_result(["origin", "goldfish", "retrain", "sisa", "fed-recovery"])
    result["methods"]["goldfish"]["notes"] = ["shards were shared: this is not exact"]
    assert "Backdoor success of the other methods: sisa 0.4 % and fed-recovery 61.0 %." in text(
        result
    )
    assert "shards were shared: this is not exact." in headline(result).sentences


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
    result["config"]["deletion"]["class_label"] = 3
    result["deletion"]["requests"] = [{"client_id": c, "samples": 9, "kind": kind} for c in clients]
    assert expected in asked_sentence(result)


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
    assert "quality" not in text(make_grown(["origin", "retrain"]))
