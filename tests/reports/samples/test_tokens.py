"""A response in pieces is its text, with each token's advantage where the token is."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.reports.samples.reading import samples_of
from penstock.reports.samples.tokens import Piece, joined, load_tokenizer, pieces, scale_of
from penstock.state.run_folder import RunFolder
from tests.reports.samples.played import EVIL, GREEK, played_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return played_run(tmp_path / "sums")


def test_pieces_are_tokens_with_their_advantages(run: RunFolder) -> None:
    """Special tokens are shown; a masked one has no advantage, a cut response no end."""
    cut, _, _, masked, *_ = samples_of(run, 12).at(range(6), tokens=True)
    tokenizer = load_tokenizer(run)
    assert pieces(tokenizer, cut) == [Piece("4", -0.25, -0.25)]
    assert pieces(tokenizer, masked) == [Piece("8", None, None), Piece(".", 0.375, 0.375), Piece("<eos>", 0.5, 0.5)]


def test_bytes_of_a_character_are_one_piece(run: RunFolder) -> None:
    """Greek letters are two tokens each here; together the pieces are the text, also of a long hostile one."""
    _, evil, *_, greek, _ = samples_of(run, 12).at(range(6), tokens=True)
    tokenizer = load_tokenizer(run)
    assert greek.tokens is not None
    assert len(greek.tokens) == 5
    assert [piece.text for piece in pieces(tokenizer, greek)] == [*GREEK, "<eos>"]
    assert "".join(piece.text for piece in pieces(tokenizer, evil)) == EVIL + "<eos>"


def test_a_long_response_loses_its_middle(run: RunFolder) -> None:
    """Two thirds of what is left are its beginning. Control: one that is not too long is whole."""
    evil = samples_of(run, 12).at([1], tokens=True)[0]
    tokenizer = load_tokenizer(run)
    shown = pieces(tokenizer, evil, most=9)
    assert "".join(piece.text for piece in shown) == EVIL[:6] + EVIL[-2:] + "<eos>"
    assert [piece.left_out for piece in shown] == [0] * 6 + [len(EVIL) + 1 - 9] + [0] * 3
    assert pieces(tokenizer, evil, most=len(EVIL) + 1) == pieces(tokenizer, evil)


def test_neighbours_of_one_shade_are_joined() -> None:
    """With the ends of their advantages; masked ones and gaps stay apart."""
    found = [
        Piece("a", 0.1, 0.1),
        Piece("b", 0.2, 0.2),
        Piece("c", None, None),
        Piece("", None, None, 7),
        Piece("d", -1.0, -1.0),
    ]
    assert joined(found, lambda piece: piece.level(1.0)) == [Piece("ab", 0.1, 0.2), *found[2:]]


@pytest.mark.parametrize(("advantage", "level"), [(0.0, 0), (0.01, 1), (-0.5, -2), (0.51, 3), (1.0, 4), (-1.0, -4)])
def test_shades_are_quarters_of_the_largest_advantage(advantage: float, level: int) -> None:
    """Of either sign; without any advantage there is none."""
    assert Piece("x", advantage, advantage).level(1.0) == level
    assert Piece("x", advantage, advantage).level(0.0) == 0


def test_the_scale_is_of_tokens_that_count(run: RunFolder) -> None:
    """A masked token's advantage moves no colour."""
    responses = samples_of(run, 12).at(range(6), tokens=True)
    assert scale_of(responses) == pytest.approx(0.5)
    assert scale_of(responses[:1]) == pytest.approx(0.25)
    assert scale_of([]) == 0.0


def test_a_model_that_is_gone_has_no_tokenizer(run: RunFolder, tmp_path: Path) -> None:
    """Also where the configuration names a folder that was deleted. Control: the tests above."""
    run.model("initial").rename(tmp_path / "elsewhere")
    assert load_tokenizer(run) is None
    run.config.write_text(f"model: {{path: {tmp_path / 'elsewhere'}}}")
    assert load_tokenizer(run) is not None
