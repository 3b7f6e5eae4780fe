"""Prepare: the model's starting folder, tokenized prompts, the source of rewards, and models on their engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.files import filling
from penstock.base.interrupts import interrupts_deferred
from penstock.base.ragged import Ragged
from penstock.checks.prompts import takes_each
from penstock.checks.tokenized import note_tokenized
from penstock.data.images import ImageFolder
from penstock.data.prompts import PromptTable, tokenize_prompts
from penstock.data.sft import tokenize_pairs
from penstock.data.source import forget, split_of
from penstock.data.tokenizer import load_tokenizer, make_byte_tokenizer
from penstock.engines.commands.build import Built, Kernels, MakeTiny
from penstock.engines.commands.reshard import Resharded
from penstock.engines.families.tiny import SPECIAL
from penstock.engines.groups.placement import describe_strategy, reshard_strategy
from penstock.environments.loading import tools_told
from penstock.rewards.source import open_scorer
from penstock.session.session import Training
from penstock.state.experience import IMAGES, read_columns, write_columns
from penstock.state.manifest import write_hashes
from penstock.tasks.iteration.reshard import bring_weights


@task(task_run_name="starting-model", cache_policy=NO_CACHE)
def starting_model(training: Training) -> str:
    """Return the folder that the actor starts from; a tiny model is made on its first use, whole or not at all."""
    config, run = training.config, training.run
    if config.model.tiny is None:
        return str(Path(str(config.model.path)).resolve())
    folder = run.model("initial")
    if not folder.exists():
        training.session().await_engines()
        training.session().say("making a tiny model")
        with filling(folder) as aside:
            with interrupts_deferred():
                make_byte_tokenizer(aside, special=() if config.model.tiny.encoder is None else [*SPECIAL.values()])
            training.session().call("actor", MakeTiny(config.model_dump(mode="json"), str(aside)), "0/make_tiny")
            write_hashes(aside)
    return str(folder)


@task(task_run_name="prompts", cache_policy=NO_CACHE)
def load_prompts(training: Training, model_folder: str) -> dict[str, int]:
    """Tokenize the prompts into the run folder (once per run) and open the source of rewards; return counts.

    Neither depends on the engines: a recovery from a loss finds both done.
    """
    session, config = training.session(), training.config
    if session.prompts:
        return {split: len(table) for split, table in session.prompts.items()}
    session.model_folder = model_folder
    _tokenize(training, model_folder)
    session.say("reading prompts")
    counts: dict[str, int] = {}
    for split in ("train", "heldout"):
        counts |= read_split(training, split)
    for text in takes_each(config, len(session.prompts["train"].frame)):
        get_run_logger().warning("%s", text)
    open_rewards(training, "train")
    return counts


def read_split(training: Training, split: str) -> dict[str, int]:
    """Let the session have the prompts of a split, which lie in the run folder; return counts."""
    table = training.session().prompts[split] = PromptTable.load(training.run.prompts(split))
    if table.dropped:
        get_run_logger().warning("%s: %d prompts dropped, longer than data.max_prompt_tokens", split, table.dropped)
    if table.cut:
        get_run_logger().warning("%s: %d prompts cut, longer than data.max_prompt_tokens", split, table.cut)
    return {split: len(table), f"{split}_dropped": table.dropped}


def open_rewards(training: Training, split: str) -> None:
    """Open what scores responses, which gets the columns of a split; nothing where an engine group does it."""
    session, reward = training.session(), training.config.reward
    if not reward.scored_by_flow:
        return
    columns, log = session.prompts[split].columns, training.run.logs / "reward.log"
    session.scorer = session.stack.enter_context(open_scorer(reward, columns, log))


def _tokenize(training: Training, model_folder: str) -> None:
    """Tokenize those prompts that the run folder does not hold yet."""
    session, config, run = training.session(), training.config, training.run
    splits = [split for split in ("train", "heldout") if not run.prompts(split).exists()]
    if not splits:
        return
    note_tokenized(run, "prompts", config)
    session.say("loading the tokenizer")
    tokenizer = load_tokenizer(model_folder, config.model.code)
    session.say("tokenizing prompts")
    tools, images = tools_told(config.environment), images_of(training, model_folder)
    for split in splits:
        rows = split_of(config, split)
        tokenize_prompts(rows, config.data, tokenizer, split, tools, images).save(run.prompts(split))


def images_of(training: Training, model_folder: str) -> ImageFolder | None:
    """Return where the images of the rows are kept; None if they have none."""
    return ImageFolder(training.run.images, model_folder) if training.config.data.image_column else None


@task(task_run_name="pairs", cache_policy=NO_CACHE)
def load_pairs(training: Training, model_folder: str) -> int:
    """Tokenize the supervised pairs into the run folder (once per run); return how many there are."""
    path = training.run.prompts("sft")
    if not path.exists():
        _tokenize_pairs(training, model_folder)
    forget()  # these are the last rows: in `train` the prompts come first
    return len(read_columns(path, ["response_tokens"])["response_tokens"])


def _tokenize_pairs(training: Training, model_folder: str) -> None:
    config = training.config
    assert config.sft is not None
    note_tokenized(training.run, "sft", config)
    training.session().say("tokenizing the pairs of supervised training")
    response = config.data.response or "response"
    pairs = tokenize_pairs(
        split_of(config, "sft"),
        config.data.prompt,
        response,
        load_tokenizer(model_folder, config.model.code),
        config.data,
        config.sft.max_tokens,
        tools_told(config.environment),
        images_of(training, model_folder),
    )
    if pairs.dropped:
        get_run_logger().warning("sft: %d pairs dropped, longer than sft.max_tokens", pairs.dropped)
    kinds = {name: np.int64 if name == IMAGES else np.int32 for name in pairs.frame.columns}
    columns = {name: Ragged.of(list(pairs.frame[name]), kind) for name, kind in kinds.items()}
    write_columns(training.run.prompts("sft"), columns)


@task(task_run_name="build-engines", cache_policy=NO_CACHE)
def build_engines(training: Training, model_folder: str) -> dict[str, int | str]:
    """Load every role's model on its group; return parameter counts and the reshard's strategy."""
    forget()  # the rows are tokenized
    session = training.session()
    session.model_folder = model_folder
    session.await_engines()
    session.say("loading models into DeepSpeed and vLLM")
    replies = session.call_all({group: session.build(group.spec.roles) for group in session.distinct_groups}, "0/build")
    if session.elastic is not None:
        session.elastic.model_is_there()
    strategy, built = reshard_strategy(session.config), [reply for ranks in replies.values() for reply in ranks]
    engines: list[Built | Resharded] = [*built]
    if strategy == "broadcast":
        engines += bring_weights(session, "0/reshard", version=0)
    figures: dict[str, int | str] = {
        "parameters": max(reply.parameters for reply in built),
        "parameters_shared": max(reply.parameters_shared for reply in engines),
        "parameters_copied": max(reply.parameters_copied for reply in engines),
    }
    get_run_logger().info(
        "%s parameters, of which %s are trained; reshard by %s: %s; %s of the rollout engine's tensors are the actor's "
        "own, %s are written",
        figures["parameters"],
        max(reply.trained for reply in built),
        strategy,
        describe_strategy(session.config),
        figures["parameters_shared"],
        figures["parameters_copied"],
    )
    figures |= {"reshard_strategy": strategy, "attention": attention_of(built[0].kernels)}
    recomputed = "; ".join(f"{name}: {value}" for name, value in session.recomputed.items())
    get_run_logger().info("recomputed in the backward pass: %s", recomputed)
    if session.kv_cache_stays is not None:
        text = "stays" if session.kv_cache_stays else "gives its memory to training"
        get_run_logger().info("between rollouts the KV cache %s", text)
    session.engine_figures = figures
    return figures


def attention_of(kernels: Kernels) -> str:
    """Return which kernel a rank's attention takes; say so, with a warning where its GPU has faster kernels."""
    get_run_logger().info("attention of updates and log-probs: %s", kernels.attention)
    for obstacle in kernels.slower:
        get_run_logger().warning("updates are slower than this GPU can be, %s", obstacle)
    return kernels.attention
