"""What every thread is doing is shown by its name."""

from __future__ import annotations

import threading

from penstock.base.stacks import stacks_of_threads


def test_every_thread_is_shown_with_the_function_it_is_in() -> None:
    """The main one first. Control: a thread that has ended is not."""
    begun, end = threading.Event(), threading.Event()

    def standing_still() -> None:
        begun.set()
        end.wait(60)

    other = threading.Thread(target=standing_still, name="other")
    other.start()
    begun.wait(60)
    shown = stacks_of_threads()
    end.set()
    other.join()
    later = stacks_of_threads()
    assert shown.startswith("thread MainThread:")
    assert "in test_every_thread_is_shown_with_the_function_it_is_in" in shown.split("thread other:")[0]
    assert "in standing_still" in shown.split("thread other:")[1]
    assert "thread other:" not in later
