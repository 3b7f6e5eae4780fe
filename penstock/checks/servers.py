"""Checks of the servers that give rewards, before any engine starts: do they answer, and with the right model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from configs.sections.reward import RewardConfig
from configs.sections.reward_servers import RewardServer, ServiceConfig
from penstock.base.errors import UserError
from penstock.rewards.function import load_reward_function
from penstock.rewards.judge import check_template, reading
from penstock.rewards.server import Failed, RequestFailed, offered_models
from penstock.rewards.service import scores_of

PROBE = "1+1=2"

Server = TypeVar("Server", bound=RewardServer)


def check_judge(config: RewardConfig, columns: Sequence[str]) -> None:
    """Check the template, the parser and the server of `reward.judge`.

    Raises:
        UserError: one of them cannot be used.
    """
    assert config.judge is not None
    check_template(config.judge, columns)
    function = reading(config)
    load_reward_function(str(function.function), function.settings, columns, setting="reward.judge.parser")
    check_server("reward.judge", _patient_once(config.judge))


def check_service(service: ServiceConfig) -> None:
    """Check that the server of `reward.service` offers the model, and that it gives one score for a text.

    Raises:
        UserError: it does not.
    """
    service = _patient_once(service)
    check_server("reward.service", service)
    (score,) = scores_of(service, [PROBE], tolerated=0)
    if isinstance(score, Failed):
        raise UserError(
            f"reward.service: {service.url} does not score a text with '{service.model}': {score.reason}",
            "serve a sequence classifier with one label: penstock serve FOLDER",
        )


def check_server(key: str, server: RewardServer) -> None:
    """Check that a server answers and offers the configured model.

    Raises:
        UserError: it does not; `key` is the section's name, for the message.
    """
    try:
        offered = offered_models(server)
    except RequestFailed as error:
        raise UserError(
            f"{key}.url: {server.url} does not answer as a server with OpenAI's API: {error}",
            "start it (penstock serve FOLDER), or correct the address or the key",
        ) from None
    if server.model not in offered:
        names = ", ".join(f"'{name}'" for name in offered[:5]) or "no model"
        raise UserError(
            f"{key}.model: {server.url} does not offer '{server.model}'; it offers {names}",
            f"correct {key}.model, or serve the model under this name: penstock serve FOLDER --name {server.model}",
        )


def _patient_once(server: Server) -> Server:
    """Return the server's section with one further attempt only: whoever starts a training waits for the answer."""
    return server.model_copy(update={"retries": min(1, server.retries)})
