"""What is kept stays below a number of bytes, and what was asked for lately is not made again."""

from __future__ import annotations

from penstock.base.recent import Recent


def test_what_was_not_asked_for_longest_goes_first() -> None:
    """Control: what is still there is not made again."""
    made = list[str]()

    def make(key: str) -> str:
        made.append(key)
        return key * 4

    kept = Recent(make, len, most=9)
    assert [kept(key) for key in "abacab"] == [key * 4 for key in "abacab"]
    assert made == ["a", "b", "c", "b"]


def test_the_newest_stays_however_large() -> None:
    """And the one after it sends it away."""
    made = list[int]()
    kept = Recent(lambda size: made.append(size) or b"x" * size, len, most=10)
    for size in (100, 100, 4, 100):
        assert len(kept(size)) == size
    assert made == [100, 4, 100]
