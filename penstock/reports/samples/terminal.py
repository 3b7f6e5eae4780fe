"""Responses of a run on a terminal: a list, all responses to a prompt token by token, and what fell.

What a model wrote is shown, never obeyed: control characters, which move a terminal's cursor or set its title, become
the pictures of themselves.

Left out: reading them (reading.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from penstock.reports.samples.fallen import Comparison
from penstock.reports.samples.reading import Response, Samples
from penstock.reports.samples.tokens import Piece, Segment, joined, load_tokenizer, pieces, scale_of, segments
from penstock.state.run_folder import RunFolder

LINES, CHARACTERS = 12, 1_500  # of a text in a list; the view of a prompt has all of it
GREENS, REDS = ("#d8f3e3", "#a9e5c5", "#74d3a2", "#3fbf80"), ("#fde3e6", "#f9c3ca", "#f2949f", "#e76a7a")
SHADES = {  # black on a pale ground reads on a dark terminal and on a light one
    side * level: Style(color="black", bgcolor=ground)
    for side, grounds in ((1, GREENS), (-1, REDS))
    for level, ground in enumerate(grounds, 1)
}
MASKED = Style(dim=True, italic=True)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str) -> str:
    """Return text without characters that do something to a terminal."""
    return _CONTROL.sub(lambda found: _picture(ord(found[0])), text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def about(samples: Samples) -> Iterator[Text]:
    """Say what is looked at: how many responses, what they earned, and what is missing of them."""
    rewards_B = samples.values("reward")
    where = "the evaluation after iteration" if samples.heldout else "iteration"
    said = f"{where} {samples.iteration}: {len(rewards_B):,} responses to {len(set(samples.prompt_ids())):,} prompts"
    said += f", reward {rewards_B.mean():.3f} on the mean, {rewards_B.min():g} to {rewards_B.max():g}"
    if "truncated" in samples.names:
        said += f", {samples.values('truncated').mean():.1%} cut"
    yield Text(said, "bold")
    if samples.is_table:
        yield _only_a_table(samples)


def _only_a_table(samples: Samples) -> Text:
    kept = f"{len(samples)} rows that {samples.path.parent.name}/{samples.path.name} kept of it"
    return Text(f"the experience of iteration {samples.iteration} is not in the run folder: there are {kept}", "yellow")


def listed(responses: Sequence[Response]) -> Iterator[RenderableType]:
    """Show responses one below the other, each with its prompt, long texts without their middle."""
    for response in responses:
        yield _rule(_heading(response))
        texts = {"prompt": _clipped(response.prompt), "response": _clipped(response.response)}
        yield _texts(_seen(response) | texts)


def of_prompt(
    run: RunFolder, samples: Samples, responses: Sequence[Response], console: Console
) -> Iterator[RenderableType]:
    """Show all that was answered to a prompt, whole, with the advantage of each token as its colour."""
    yield _texts(_seen(responses[0]) | {"prompt": responses[0].prompt})
    tokenizer = load_tokenizer(run) if responses[0].tokens is not None else None
    scale, coloured = scale_of(responses), console.color_system in ("256", "truecolor") and not console.no_color
    for response in responses:
        yield _rule(_heading(response))
        text = Text(shown(response.response))
        if tokenizer is not None:
            text = _by_token(pieces(tokenizer, response), scale, coloured)
        if response.truncated:
            text.append(" ✂ cut here", "red")
        yield Padding(text, (0, 0, 0, 2))
    yield Rule(style="dim")
    yield _legend(samples, responses, scale, tokenizer is not None, coloured)


def turn_by_turn(run: RunFolder, responses: Sequence[Response]) -> Iterator[RenderableType]:
    """Show episodes: what the policy said, and between its turns, dimmed, what it was told and learns nothing from.

    Of several paths each begins with the tokens that it comes after.

    Args:
        responses: with their tokens and masks.
    """
    tokenizer = load_tokenizer(run)
    for response in responses:
        yield _rule(_heading(response))
        yield _texts(_seen(response) | {"prompt": _clipped(response.prompt)})
        if tokenizer is None:
            yield _texts({"episode": response.response})
            continue
        yield _turns(segments(tokenizer, response))
        if response.truncated:
            yield Text("✂ cut here", "red")
    if tokenizer is None:
        yield Text("the model's folder with the tokenizer is not there: turns cannot be told apart", "yellow")


def _turns(found: Sequence[Segment]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(justify="right", no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    turn = 0
    for segment in found:
        turn += segment.own
        text = segment.text.strip("\n") if segment.path is None else _clipped(segment.text)
        said = Text(shown(text), "" if segment.own else MASKED)
        told = "told" if segment.path is None else f"path {segment.path} after"
        grid.add_row(f"turn {turn}" if segment.own else told, f"{segment.tokens:,}", said)
    return grid


def of_comparison(found: Comparison, samples: Samples) -> Iterator[RenderableType]:
    """Show what two iterations differ in, and the prompts that lost most with a response of each."""
    what = "evaluations after iterations" if samples.heldout else "iterations"
    before, after = str(found.before.iteration), str(found.after.iteration)
    yield Text(f"{what} {before} and {after}", "bold")
    for side in (found.before, found.after):
        if side.is_table:
            yield _only_a_table(side)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("mean of all responses", header_style="dim")
    for name in (before, after, "change"):
        table.add_column(name, justify="right", header_style="dim")
    for figure in found.figures:
        change = Text("–", "dim") if figure.change is None else _signed(figure.change, "{:+.4g}")
        table.add_row(shown(figure.name), _number(figure.before), _number(figure.after), change)
    yield table
    if not found.prompts:
        yield Text("no prompt was answered in both, so the figures are of different ones", "yellow")
        if not samples.heldout:
            yield Text("held-out prompts are the same in each evaluation: --evaluation", "yellow")
        return
    yield Text(
        f"of {found.prompts:,} prompts that both answered {found.lost:,} lost, {found.gained:,} gained, "
        f"{found.prompts - found.lost - found.gained:,} are as they were"
    )
    for prompt in found.fallen:
        rewards = f"  {prompt.before:.3f} → {prompt.after:.3f}  "
        yield _rule(Text.assemble((prompt.prompt_id, "bold"), rewards, (f"{prompt.change:+.3f}", "red")))
        texts = dict[str, str]()
        for label, response in ((f"best in {before}", prompt.best_before), (f"worst in {after}", prompt.worst_after)):
            if response is not None:
                texts |= _seen(response)
                texts |= {"prompt": response.prompt, f"{label}, {response.reward:g}": response.response}
        yield _texts({label: _clipped(text) for label, text in texts.items()})


def _seen(response: Response) -> dict[str, str]:
    """Return the images of a prompt, by their names in the run folder."""
    return {"images": "\n".join(response.images)} if response.images else {}


def _rule(heading: Text) -> Rule:
    return Rule(heading, align="left", style="dim", characters="─")


def _heading(response: Response) -> Text:
    words = Text.assemble((shown(response.sample_id), "bold"), "  reward ", (f"{response.reward:.3f}", "bold"))
    if response.parts:
        parts = ", ".join(f"{part} {value:.3f}" for part, value in response.parts.items())
        words.append(f" ({shown(parts)})", "dim")
    if response.advantage is not None:
        words.append("  advantage ").append_text(_signed(response.advantage, "{:+.3f}"))
    if response.length is not None:
        words.append(f"  {response.length:,} tokens")
    for remark in response.remarks:
        words.append(f"  {shown(remark)}", "yellow")
    return words


def _texts(texts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in texts.items():
        grid.add_row(label, Text(shown(text)))
    return grid


def _clipped(text: str) -> str:
    """Return a text without its middle where it is longer than the reader of a list wants."""
    lines = text.split("\n")
    if len(lines) > LINES:
        text = "\n".join([*lines[: LINES * 2 // 3], f"[... {len(lines) - LINES:,} lines ...]", *lines[-LINES // 3 :]])
    if len(text) > CHARACTERS:
        half = CHARACTERS // 2
        text = f"{text[:half]} [... {len(text) - CHARACTERS:,} characters ...] {text[-half:]}"
    return text


def _by_token(found: list[Piece], scale: float, coloured: bool) -> Text:
    text = Text()
    for piece in joined(found, lambda piece: piece.level(scale) if coloured else piece.low):
        words = shown(piece.text)
        if coloured:
            text.append(words, MASKED if piece.low is None else SHADES.get(piece.level(scale), ""))
        else:
            text.append(f"{{{words}}} " if piece.low is None else f"[{words}]{piece.low:+.2f} ")
    return text


def _legend(samples: Samples, responses: Sequence[Response], scale: float, tokens: bool, coloured: bool) -> Text:
    if responses[0].tokens is None:
        return Text(f"{samples.path.name} holds no tokens", "dim")
    if not tokens:
        return Text("the model's folder with the tokenizer is not there: tokens cannot be told apart", "yellow")
    if responses[0].advantages is None:
        why = "nothing is learnt from held-out responses" if samples.heldout else "they are not computed yet"
        return Text(f"no advantages: {why}", "dim")
    if not coloured:
        return Text("[...] tokens and their advantage; {...} masked, nothing is learnt from them", "dim")
    bar = [("  ", SHADES[level]) for level in sorted(SHADES)]
    return Text.assemble(("advantage ", "dim"), f"{-scale:+.2f} ", *bar, f" {scale:+.2f}   ", ("masked", MASKED))


def _number(value: float | None) -> Text:
    return Text("–", "dim") if value is None else Text(f"{value:.4g}")


def _signed(value: float, shape: str) -> Text:
    return Text(shape.format(value), "green" if value > 0 else "red" if value < 0 else "")
