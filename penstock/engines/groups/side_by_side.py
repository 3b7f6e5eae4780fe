"""Sends one command to several engine groups at the same time; not a task itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from penstock.engines.groups.group import EngineError, EngineGroup, GroupClosed, RankLost

Replies = list[dict[str, Any]]
LOSS_S = 2.0  # a rank that has ended is known by then; it explains why others' collectives failed


def side_by_side(
    command: str,
    key: str,
    arguments: Mapping[EngineGroup, dict[str, Any]],
    outlived: Callable[[EngineGroup], bool] = lambda _: False,
) -> dict[EngineGroup, Replies]:
    """Run a command on every group with its own arguments; return each group's replies in rank order.

    If one group fails, or the flow is interrupted, the others are ended: they may wait for it in a collective.

    Args:
        outlived: asked as soon as a group is lost or closed: whether the others go on without it; then it has no
            replies.

    Raises:
        EngineError, RankLost, UserError: what the group that failed first raised; a rank that was lost comes before an
            exception that its loss explains.
    """
    if len(arguments) == 1:
        ((group, own),) = arguments.items()
        return {group: group.call(command, key=key, **own)}

    def replies(group: EngineGroup, own: dict[str, Any]) -> Replies | None:
        try:
            return group.call(command, key=key, **own)
        except (RankLost, GroupClosed):  # who saw the loss first may have closed the group, or it was silent too long
            if outlived(group):
                return None
            raise

    with ThreadPoolExecutor(len(arguments), thread_name_prefix=command) as pool:
        calls = {pool.submit(replies, group, own): group for group, own in arguments.items()}
        try:
            ended, others = wait(calls, return_when=FIRST_EXCEPTION)
            if others and any(isinstance(call.exception(), EngineError) for call in ended):
                ended, others = wait(calls, LOSS_S)
        except BaseException:
            _close(calls.values())
            raise
        failed = [call for call in calls if call in ended and call.exception() is not None]
        _close(calls[call] for call in others)
    if failed:
        min(failed, key=_is_not_a_loss).result()
    return {group: found for call, group in calls.items() if (found := call.result()) is not None}


def _is_not_a_loss(call: Future[Replies | None]) -> bool:
    return not isinstance(call.exception(), RankLost)


def _close(groups: Any) -> None:
    for group in groups:
        group.close(grace_s=0.0)
