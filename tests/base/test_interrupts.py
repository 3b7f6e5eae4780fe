"""A signal in the block takes effect after it, once, and with the handler that was there before."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.base.interrupts import interrupts_deferred


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where an exception would be dropped, as in a finaliser. Control: without the block it is lost there."""
    heard: list[int] = []
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))

    def interrupt(number: int, _: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(number)

    signal.signal(number, interrupt)
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        Finalised()
        Finalised()
        reached.append(heard[:])
    assert (reached, heard, dropped) == ([[]], [number], [])
    assert signal.getsignal(number) is interrupt
    Finalised()  # the control: heard, and without effect
    assert (heard, dropped) == ([number, number], [KeyboardInterrupt])


def test_without_a_signal_nothing_changes_and_other_threads_may_use_it() -> None:
    """Python lets only the main thread set handlers."""
    before = signal.getsignal(signal.SIGINT)
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    entered = []

    def elsewhere() -> None:
        with interrupts_deferred():
            entered.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert entered == [True]
