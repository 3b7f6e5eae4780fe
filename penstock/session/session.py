"""What a running training holds in the flow's process, and the small handle by which tasks find it.

A Prefect task must not be handed an engine group or a table of prompts: Prefect would walk, hash and log it. So
tasks get a `Training` (one path) and ask `session()` for the living things. Left out: what the tasks do with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from pydantic import BaseModel

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.checks.memory import NOWHERE, GroupEstimate, snapshots_fit
from penstock.configs.loading.load import load_saved, to_yaml
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.configs.tree.section import Recipe
from penstock.data.samplers import PromptDraws
from penstock.engines.commands.build import Build, Built
from penstock.engines.commands.hosts import HostFacts
from penstock.engines.commands.logprob_gap import SampleToCompare
from penstock.engines.commands.message import Command, Reply, decode_news, decode_reply, encode, name_of
from penstock.engines.commands.reshard import Store
from penstock.engines.commands.rollout import Generate, Sharing
from penstock.engines.groups.group import EngineGroup, RankLost
from penstock.engines.groups.hosts import HostFailed
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import place
from penstock.engines.groups.side_by_side import side_by_side
from penstock.engines.groups.spec import GroupSpec
from penstock.engines.sizing.memory import Recomputed
from penstock.session.clock import LapClock, Span
from penstock.session.consolidation import Consolidator
from penstock.session.machines.elastic import ElasticGroups
from penstock.session.machines.hosts import Machines
from penstock.session.requests import BegunRollout, Replies
from penstock.session.saving.checkpoints import CheckpointWriter, WrittenState, write_snapshot, written_by_ranks
from penstock.session.saving.snapshots import (
    KnownSlots,
    Of,
    load_commands,
    newest_whole,
    slots_of,
    snapshot_commands,
    trained_groups,
)
from penstock.state.digests import check_signed, signed
from penstock.state.experience import ExperienceRef
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from penstock.data.prompts import PromptTable
    from penstock.reports.progress import TrainingProgress
    from penstock.rewards.source import Scorer
    from penstock.session.flow_runs.page import Page
    from penstock.state.manifest import Tracked
    from penstock.trackers.delivery import Delivery
    from penstock.trackers.outbox import Outbox
    from penstock.trackers.tracker import Tracker


Tree = TypeVar("Tree", bound=Recipe)
Given = ParamSpec("Given")


@dataclass(frozen=True)
class Training:
    """Handle of a running training: the path of its run folder."""

    folder: str

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return RunFolder(Path(self.folder))

    def session(self) -> Session:
        """The living parts of this training in this process."""
        return _SESSIONS[self.folder]

    @property
    def config(self) -> TrainConfig:
        """The resolved configuration."""
        return self.session().config


@dataclass(frozen=True)
class Stage:
    """What a task of the iteration hands on: where the experience is, and figures to record."""

    experience: ExperienceRef
    metrics: dict[str, float]


@dataclass(frozen=True)
class Meeting:
    """Where actor and rollouts meet.

    Attributes:
        store: on the machine of the actor's first rank.
        groups: that have met there last.
        number: of times that some have.
    """

    store: Store
    groups: tuple[EngineGroup, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class Recovering:
    """A loss from which a training is recovering: its number among those of the run, and when it was noticed."""

    number: int
    began: float  # time.monotonic


AHEAD = "penstock.engines.ranks.serving.ahead"  # what ranks in reserve import


@dataclass
class Session:
    """Engine groups, the source of rewards, prompts and links of one training."""

    config: TrainConfig
    run: RunFolder
    kind: str = "train"  # or "sft", "preference", "reward-model": the command that made the run
    stack: ExitStack = field(default_factory=ExitStack)
    groups: dict[Role, EngineGroup] = field(default_factory=dict)  # by role; for the rollout the first that holds it
    rollouts_apart: dict[str, EngineGroup] = field(default_factory=dict)  # groups of the rollout alone, by name
    elastic: ElasticGroups | None = None  # those that come and go; None: there is none
    meeting: Meeting | None = None  # where groups of actor and rollouts have met last; None: not yet, or they are one
    machines: Machines | None = None
    lost_at: list[float] = field(default_factory=list)  # when ranks or hosts were lost, `time.monotonic`
    recovering: Recovering | None = None  # from the last of them
    phase: str = ""  # what is waited for
    prompts: dict[str, PromptTable] = field(default_factory=dict)
    draws: PromptDraws | None = None  # the sampler of prompts and its memory
    prompt_columns: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    scorer: Scorer | None = None  # None: a reward model in the engine groups
    progress: TrainingProgress | None = None
    overrides: dict[str, Any] = field(default_factory=dict)  # live ones, in force at this iteration
    model_folder: str = ""
    trackers: list[Tracker] = field(default_factory=list)  # as the recipe orders them: the main one first
    tracked: tuple[Tracked, ...] = ()  # the runs of the first of them, or of all; none: none is begun yet
    outboxes: list[Outbox] = field(default_factory=list)  # what each of them gets
    prefect_flow_run_id: str | None = None
    prefect_url: str | None = None
    page: Page | None = None  # of the flow run in Prefect
    asked_for: str = ""  # name of the outermost flow, where that is not of this kind
    engine_figures: dict[str, int | str] = field(default_factory=dict)
    usage: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by a command's key, of each rank
    hosts: Mapping[str, HostFacts] = field(default_factory=dict)  # what other machines have, by host
    consolidator: Consolidator = field(init=False)
    reached: dict[int, Progress] = field(default_factory=dict)  # at the iterations of the last snapshots
    snapshots: bool = True  # whether the hosts' memory has room for them
    slots: KnownSlots = field(default_factory=KnownSlots)  # where they are
    checkpoints: CheckpointWriter = field(default_factory=CheckpointWriter)
    generating: ThreadPoolExecutor = field(  # a rollout and, beside it, an evaluation
        default_factory=lambda: ThreadPoolExecutor(2, "generation")
    )
    rollouts: dict[str, BegunRollout] = field(default_factory=dict)  # begun and not taken, by their handles' keys
    rollout_ended: float | None = None  # when the engines ended the last one that was taken, `time.perf_counter`
    rolled_back: int = 0  # how often in this process
    warned_of_fragments: bool = False
    history: list[Mapping[str, float]] = field(default_factory=list)  # iterations that alarms look at, oldest first
    alarms_said: set[str] = field(default_factory=set)
    logged: dict[str, float] = field(default_factory=dict)  # by a user's code, of the iteration that runs
    more_scorers: dict[str, Scorer] = field(default_factory=dict)  # of rewards that a user's dataflow adds
    recomputed: dict[str, Recomputed] = field(default_factory=dict)  # by trained model, as decided for this machine
    kv_cache_stays: bool | None = None  # between rollouts, likewise; None: on no GPU, or there is no rollout
    engines_awaited: bool = False
    generations: Iterator[int] = field(default_factory=lambda: count(1))  # numbers for commands that generate
    clock: LapClock = field(default_factory=LapClock)
    started: float = field(default_factory=time.monotonic)
    seconds_before: float = 0.0  # of earlier attempts
    lacks: list[str] = field(default_factory=list)  # what the end of a training that is done could not write

    def __post_init__(self) -> None:
        self.consolidator = Consolidator(self.run.experience(0).parent)

    @property
    def distinct_groups(self) -> list[EngineGroup]:
        """Every engine group that stays, once, in role order."""
        return list(dict.fromkeys((*self.groups.values(), *self.rollouts_apart.values())))

    @property
    def rollout_groups(self) -> list[EngineGroup]:
        """The groups whose engines share the prompts of a generation; none where there is no rollout."""
        if self.rollouts_apart:
            members = self.elastic.members if self.elastic is not None else []
            return [*self.rollouts_apart.values(), *members]
        return [self.groups["rollout"]] if "rollout" in self.groups else []

    @property
    def rollout_engines(self) -> int:
        """How many engines share the prompts of a generation."""
        ranks = sum(len(group.spec.devices) for group in self.rollout_groups)
        return ranks // self.config.rollout.tensor_parallel

    @property
    def awaited_replies(self) -> list[Future[Replies]]:
        """Those of the rollouts that the engines have begun and nobody has taken."""
        return [begun.generation.replies for begun in self.rollouts.values() if begun.generation is not None]

    @property
    def reproducible(self) -> bool:
        """Whether timing has no part in which tokens are sampled (`rollout.reproducible`)."""
        if (chosen := self.config.rollout.reproducible) is not None:
            return chosen
        return self.groups["rollout"].spec.devices[0].gpu is None

    def deliver(
        self,
        label: str,
        what: Callable[Concatenate[Delivery, Given], None],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> None:
        """Have every tracker get something, each on a thread of its own, and return at once.

        Args:
            label: what it is, for people.
            what: the method of `Delivery` that takes what is given.
        """
        for outbox in self.outboxes:
            outbox.put(label, partial(what, outbox.delivery, *given, **named))

    def call(
        self,
        role: Role,
        command: Command[Reply] | Sequence[Command[Reply]],
        key: str,
        on_news: Callable[[Any], None] | None = None,
    ) -> list[Reply]:
        """Send a command to the group that holds `role`; return the replies in rank order. See `call_all`."""
        group = self.groups[role]
        return self.call_all({group: command}, key, on_news)[group]

    def generate(
        self, command: Generate | SampleToCompare, key: str, on_news: Callable[[Any], None] | None = None
    ) -> tuple[list[Any], bool]:
        """Send a command to all groups that generate, whose engines share its prompts. See `call_all`.

        Returns the replies of those that are there to the end, in rank order, and whether these are all.
        """
        groups = self.rollout_groups
        commands: dict[EngineGroup, Command[Any]] = {
            group: replace(command, sharing=sharing) for group, sharing in shared_by(groups).items()
        }
        replies = self.call_all(commands, key, on_news, self._outlived)
        return [reply for group in groups for reply in replies.get(group, ())], len(replies) == len(groups)

    def _outlived(self, group: EngineGroup) -> bool:
        """Whether a generation goes on without a group that is lost, which then gets no more prompts."""
        if self.elastic is None or not group.spec.elastic:
            return False
        self.elastic.leave(group)
        return True

    def call_all(
        self,
        commands: Mapping[EngineGroup, Command[Reply] | Sequence[Command[Reply]]],
        key: str,
        on_news: Callable[[Any], None] | None = None,
        outlived: Callable[[EngineGroup], bool] = lambda _: False,
    ) -> dict[EngineGroup, list[Reply]]:
        """Send commands of one type to several groups side by side: the only way from flow and tasks to a rank.

        What they used goes to `usage`, if it belongs to an iteration's figures.

        Args:
            commands: of each group the same for all its ranks, or one for each rank.
            key: names the call; repeated, the stored replies come back and nothing runs. With a third part it is one
                call of several, of which the usage is added up under the first two.
            on_news: gets what a rank tells ahead of its reply (`Generate`: `PartialResults`), and a reply while others
                are awaited; should be quick.
            outlived: asked as soon as a group is lost: whether the others go on without it; then it has no replies.

        Raises:
            EngineError, RankLost, UserError: what the group that failed first raised. The others are ended.
            WrongMessage: a reply is not what the command's type says.
        """
        if not commands:
            return {}
        first = next(iter(commands.values()))
        kind = type(first if isinstance(first, Command) else first[0])
        arguments = {group: _arguments(command) for group, command in commands.items()}
        if on_news is not None:
            arguments = {group: {**own, "on_news": _hearing(kind, on_news)} for group, own in arguments.items()}
        # After a rollback iterations are repeated: their commands are others, though of the same keys.
        sent_as = f"{key}/again-{self.rolled_back}" if self.rolled_back else key
        answers = side_by_side(name_of(kind), sent_as, arguments, outlived)
        self.slots.heard(kind, answers.keys())
        if kind.measured:
            name = "/".join(key.split("/")[:2])
            used = [answer["usage"] for ranks in answers.values() for answer in ranks]
            self.usage[name] = used if name == key or name not in self.usage else _added(self.usage[name], used)
        return {group: [decode_reply(kind, answer["reply"]) for answer in ranks] for group, ranks in answers.items()}

    def decide(self, memory: Sequence[GroupEstimate]) -> None:
        """Take over what the free memory has decided."""
        self.recomputed = {name: value for item in memory for name, value in item.recomputed.items()}
        sleeps = [item.sleep for item in memory if "rollout" in item.roles and item.devices[0].gpu is not None]
        self.kv_cache_stays = not sleeps[0] if sleeps else None
        elsewhere = self.machines.elsewhere if self.machines is not None else NOWHERE
        self.snapshots = snapshots_fit(memory, elsewhere)

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration for the ranks: with what was decided for this machine, which no file keeps."""
        tree = self.config.model_dump(mode="json")
        for name, value in self.recomputed.items():
            tree[name]["gradient_checkpointing"] = value.activations
        if self.kv_cache_stays is not None:
            tree["rollout"]["sleep"] = not self.kv_cache_stays
        return tree

    def build(self, roles: Sequence[Role]) -> Build:
        """Return the command to build the models of some roles."""
        staying = sum(len(group.spec.devices) for group in self.rollout_groups if not group.spec.elastic)
        engines = staying // self.config.rollout.tensor_parallel if "rollout" in roles else None
        keeps_logits, images = self.keeps_logits("actor"), self.image_folder
        return Build(self.engine_config(), self.model_folder, tuple(roles), keeps_logits, engines, images)

    @property
    def image_folder(self) -> str | None:
        """The folder of the images that rows name; None: they have none."""
        return str(self.run.images) if self.config.data.image_column else None

    def build_group(self, group: EngineGroup) -> list[Built]:
        """Have a group load the models of its roles."""
        return self.call_all({group: self.build(group.spec.roles)}, "0/build")[group]

    def keeps_logits(self, name: str) -> bool:
        """Whether the actor, or the model of supervised training, keeps its logits for the backward pass."""
        return name in self.recomputed and not self.recomputed[name].logits

    def start_groups(self, specs: Sequence[GroupSpec], epoch: int = 0) -> None:
        """Start engine groups, each in place of the one of the same name."""
        assert self.machines is not None
        groups = [EngineGroup(spec, self.machines.hosts, epoch) for spec in specs]
        self.rollouts_apart |= {group.spec.name: group for group in groups if group.spec.roles == ("rollout",)}
        for role in self.config.roles:
            if holding := [group for group in groups if role in group.spec.roles]:
                self.groups[role] = holding[0]

    def keep_reserve(self) -> None:
        """Have ranks in reserve where there are GPUs: their start takes longest, and there are cores for it."""
        if self.config.engine.restarts:
            for group in self.distinct_groups:
                if group.spec.devices[0].gpu is not None:
                    group.keep_reserve(AHEAD)

    def end_groups(self, grace_s: float = 10.0) -> None:
        """End every engine group that lives."""
        if self.elastic is not None:
            self.elastic.end_all()
        with ExitStack() as stack:
            for group in self.distinct_groups:
                stack.callback(group.close, grace_s)

    def restart_groups(self) -> None:
        """Replace every engine group by its next epoch, and hosts that are lost; forget what the earlier one was doing.

        What is forgotten is what a process that goes on with the run from its folder would not know either.

        Raises:
            UserError: a host of another machine does not join again.
        """
        assert self.machines is not None
        ended = self.distinct_groups
        self.end_groups(grace_s=0.0)
        wait([replies for replies in self.awaited_replies if not replies.cancel()])
        self.rollouts, self.usage, self.history, self.rollout_ended = {}, {}, [], None
        self.engines_awaited, self.meeting, self.logged = False, None, {}
        self.slots.forget()
        self.machines.replace_lost()
        self.start_groups([group.spec for group in ended], epoch=ended[0].epoch + 1)

    def take_snapshot(self, of: Of, number: int) -> None:
        """Have the ranks that train begin to copy their state; what would change it waits for the copy.

        There is none where memory has no room for it, nor where a host is lost: who waits for its ranks next is told.
        """
        if not self.snapshots:
            return
        try:
            ranks = self.slots.slots_of(trained_groups(self.config, self.distinct_groups))
        except HostFailed:
            return
        commands = snapshot_commands(ranks, of, number, self.checkpoints.writing)
        self.call_all(commands, f"{of}-{number}/take_snapshot")
        self.slots.begun(ranks, commands)

    def written_state(self, of: Of, number: int, folder: Path) -> WrittenState:
        """Return the files of the trained state in `folder`, which hosts write from a snapshot if there are any.

        Raises:
            HostFailed: a host is lost.
            UserError: the snapshot is not finished, or a file cannot be written.
        """
        if not self.snapshots:
            return written_by_ranks(folder)
        groups, deadline_s = trained_groups(self.config, self.distinct_groups), self.config.engine.command_timeout_s
        return write_snapshot(groups, of, number, folder, self.checkpoints.hopeless, deadline_s)

    def newest_snapshot(self, of: Of, at_most: int | None = None) -> int | None:
        """Return the number of the newest snapshot that every rank has finished; None: there is none.

        Raises:
            HostFailed: a host is lost.
        """
        return newest_whole(slots_of(trained_groups(self.config, self.distinct_groups)), of, at_most)

    def load_snapshot(self, of: Of, number: int, version: int) -> None:
        """Bring the ranks that train to a snapshot that they have all finished.

        Args:
            version: of the actor's weights then, for a rollout engine of its group; another group needs a reshard.
        """
        ranks = slots_of(trained_groups(self.config, self.distinct_groups))
        self.call_all(load_commands(ranks, of, number, version), f"{of}-{number}/load_snapshot")

    def say(self, text: str, detail: str = "") -> None:
        """Show on the terminal what is waited for from now on, and how far it is."""
        self.phase = text
        if self.progress is not None:
            self.progress.phase(text, detail)

    def await_engines(self) -> None:
        """Wait, once, until every rank has imported its libraries, and say so: what follows would be blamed for it.

        Where nothing is shown the first command waits for them.
        """
        if self.engines_awaited or self.progress is None:
            return
        self.say("waiting for the engines, which import PyTorch, DeepSpeed and vLLM")
        for group in self.distinct_groups:
            group.wait_ready()
        self.engines_awaited = True


def shared_by(groups: Sequence[EngineGroup]) -> dict[EngineGroup, Sharing]:
    """Return the place of each group's ranks among those of all groups, one after the other."""
    sizes = [len(group.spec.devices) for group in groups]
    return {
        group: Sharing(sum(sizes), before) for group, before in zip(groups, accumulate(sizes, initial=0), strict=False)
    }


def _arguments(command: Command[Any] | Sequence[Command[Any]]) -> dict[str, Any]:
    """Return a command as a group takes it."""
    if isinstance(command, Command):
        fields: dict[str, Any] = encode(command)
        return fields
    return {"per_rank": [encode(item) for item in command]}


def _hearing(kind: type[Command[Any]], on_news: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    def hear(answer: dict[str, Any]) -> None:
        on_news(decode_reply(kind, answer["reply"]) if "reply" in answer else decode_news(kind, answer["news"]))

    return hear


_SESSIONS: dict[str, Session] = {}


@contextmanager
def open_session(
    config: TrainConfig, run: RunFolder, memory: Sequence[GroupEstimate], machines: Machines
) -> Iterator[Training]:
    """Start the engine groups of a training and keep its session until the context ends; engines end with it.

    Whoever calls this holds the run's lock.

    Args:
        memory: the estimates that the free memory was checked with; they say what is recomputed, and what sleeps.
        machines: this one and others, whose hosts start the ranks.
    """
    session = Session(config, run, machines=machines)
    with registered(session) as training, session.stack:
        session.stack.enter_context(session.consolidator)
        session.stack.enter_context(session.checkpoints)
        session.stack.enter_context(session.generating)  # left after the groups: closed, they end what it waits for
        gpus = visible_gpus()
        session.decide(memory)
        session.hosts = machines.elsewhere.hosts
        specs = place(config, len(gpus), run.logs, machines.elsewhere.pools, machines.elsewhere.mine)
        session.stack.callback(session.end_groups)
        session.start_groups([spec for spec in specs if not spec.elastic])
        if coming := [spec for spec in specs if spec.elastic]:
            engine, build = config.engine, session.build_group
            groups = ElasticGroups(coming, machines, build, engine.restarts, engine.restart_window_s)
            session.elastic = session.stack.enter_context(groups)
        yield training


@contextmanager
def registered(session: Session) -> Iterator[Training]:
    """Let the handle of a training find its session, until the context ends."""
    training = Training(str(session.run.path))
    _SESSIONS[training.folder] = session
    try:
        yield training
    finally:
        del _SESSIONS[training.folder]


def only_session() -> Session:
    """Return the session of the one training that runs in this process.

    Raises:
        UserError: there is none, or several.
    """
    if len(_SESSIONS) != 1:
        found = f"{len(_SESSIONS)} trainings run" if _SESSIONS else "no training runs"
        raise UserError(f"{found} in this process", "it is for code that one training calls, such as a dataflow")
    return next(iter(_SESSIONS.values()))


def write_config(run: RunFolder, config: BaseModel) -> None:
    """Write the resolved configuration into the run folder, with its digest."""
    write_text(run.config, signed(to_yaml(config)))


@overload
def read_config(run: RunFolder) -> TrainConfig: ...


@overload
def read_config(run: RunFolder, kind: type[Tree]) -> Tree: ...


def read_config(run: RunFolder, kind: Any = TrainConfig) -> Any:
    """Read the resolved configuration of an existing run.

    Raises:
        Damaged: it is not what was written. What may change in a run is given to `--resume`.
    """
    check_signed(run.config, f"'--resume {run.path}' sets it aside; what may change is given to it, as key=value")
    return load_saved(run.config, kind)


def _added(before: list[dict[str, float]], more: list[dict[str, float]]) -> list[dict[str, float]]:
    """Add up what calls used on the same ranks: seconds and work; of memory the fuller call's."""
    return [
        {
            name: (fuller.get(name, 0.0) if name.endswith("_gib") else one.get(name, 0.0) + other.get(name, 0.0))
            for name in one | other
        }
        for one, other in zip(before, more, strict=True)
        for fuller in [max(one, other, key=lambda usage: usage.get("allocated_gib", 0.0))]
    ]


def may_help_again(_: Any, __: Any, state: State[Any]) -> bool:
    """Whether a failed task is worth a retry, Prefect's `retry_condition_fn`.

    A user's mistake stays one, and from a loss the whole training recovers.
    """
    return not isinstance(state.data, UserError | RankLost)


@contextmanager
def timed(training: Training, metrics: dict[str, float], task: str) -> Iterator[Span]:
    """Add the seconds of the block to `metrics` as `time/<task>_s`; the iteration's shares count it, too."""
    with training.session().clock.timed(task) as span:
        yield span
    metrics[f"time/{task}_s"] = metrics.get(f"time/{task}_s", 0.0) + span.seconds


def prompt_columns(training: Training, split: str) -> dict[str, dict[str, Any]]:
    """Return the data columns of every prompt of a split by prompt id; made once per training."""
    cache = training.session().prompt_columns
    if split not in cache:
        cache[split] = training.session().prompts[split].rows()
    return cache[split]
