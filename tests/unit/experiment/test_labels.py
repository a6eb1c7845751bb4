"""What a run says of weights that another one trained."""

from __future__ import annotations

from caramba.experiment.session import labels_as


def test_a_teacher_trained_from_scratch_is_a_proxy_and_the_folders_of_its_run_are_not_ours() -> None:
    labels = {
        "origin": "trained from scratch on stdlib",
        "student_weights": "/a/folder",
        "student_weights_signature": "0" * 64,
        "teacher_weights": "/another",
    }
    assert labels_as("teacher", labels) == {"proxy": "trained from scratch on stdlib"}
    assert labels_as("student", labels) == {"origin": "trained from scratch on stdlib"}
    assert labels_as("teacher", {"proxy": "a", "origin": "b"})["proxy"] == "a"
