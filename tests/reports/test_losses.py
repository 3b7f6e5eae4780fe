"""What a run lost is told in the report, with what became of it."""

from __future__ import annotations

from penstock.reports.losses import losses_of

JOINED = {"event": "group joined", "group": "spare", "after": 0}
LEFT = {"event": "group left", "group": "spare", "after": 4, "reason": "exited with signal 9", "for_good": False}


def test_an_elastic_group_is_a_loss_that_held_nobody_up() -> None:
    """With when it came back, if it has. Controls: that it joined is none, nor is that of another group."""
    (lost,) = losses_of([JOINED, LEFT])
    assert (lost.what, lost.when, lost.why) == ("elastic group spare", "after 3", "exited with signal 9")
    assert lost.then == "others answered its prompts; it has not joined again"
    (lost,) = losses_of([JOINED, LEFT, {**JOINED, "group": "other", "after": 5}, {**JOINED, "after": 7}])
    assert lost.then == "others answered its prompts; it joined again after 7"
    (lost,) = losses_of([JOINED, {**LEFT, "for_good": True}])
    assert lost.then == "others answered its prompts; it stays away"
