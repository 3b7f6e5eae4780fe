"""Checks before anything starts: every mistake that can be seen without an engine ends the run here, in one message.

In the order of what is cheapest to see and what later checks need: model folder, data, reward, devices, memory.
Nothing is written, no engine is started, torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from configs.errors import UserError
from configs.schedule import largest
from configs.schema import DataConfig, Role, SftConfig, TrainConfig, TrainerConfig
from data.agents import agent_numbers
from data.prompts import refuse_reserved
from data.rows import read_rows, require_columns, require_filled
from engines.architecture import check_architecture
from engines.machine import free_gpu_bytes, free_host_bytes, has_gated_products, visible_gpus
from engines.memory import (
    GIB,
    PHASES,
    Rank,
    RankMemory,
    Recomputed,
    choose_recomputed,
    decide_sleep,
    rank_memory,
    weight_width,
)
from engines.placement import place
from engines.served import check_served
from engines.shape import ModelShape, layer_names, read_shape, weight_shapes
from environments.loading import load_environment
from evaluators.loading import load_evaluators
from rewards.function import load_reward_function
from tasks.check_prompts import check_prompt_lengths, read_prompts
from tasks.check_sampling import check_sampling
from tasks.check_servers import check_judge, check_service

ARITHMETIC_COLUMNS = ("prompt_id", "prompt", "answer", "response", "carries")


@dataclass(frozen=True)
class GroupEstimate:
    """Placement and estimated memory of one rank of a group."""

    group: str
    roles: tuple[str, ...]
    devices: tuple[int | None, ...]
    memory: RankMemory
    recomputed: dict[str, Recomputed]  # by trained model
    sleep: bool | None  # of its rollout engine, on GPUs


def check_training(config: TrainConfig) -> list[GroupEstimate]:
    """Check everything that `train` needs; return the placement with memory estimates.

    Raises:
        UserError: the first mistake found.
    """
    check_inputs(config)
    return check_memory(config)


def check_inputs(config: TrainConfig) -> None:
    """Check all that does not depend on what else runs on this machine: model, data, reward, evaluators.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config)
    check_rollout_model(config)
    if config.critic is not None and config.critic.path is not None:
        check_model_folder(Path(config.critic.path), "critic.path")
    check_targets(config)
    frames = read_prompts(config)
    columns = check_prompts(config, frames)
    check_agents(config, frames["train"])
    if config.data.chat:
        check_chat(config)
    if config.sft is not None:
        check_pairs(config)
    check_environment(config)
    check_reward(config, columns)
    check_sampling(config)
    load_evaluators(config.evaluate.evaluators or ())
    check_prompt_lengths(config, frames)


def check_model(config: TrainConfig, scores: bool = False) -> None:
    """Check that the actor, or the reward model with `scores`, has a starting point.

    Raises:
        UserError: none is configured, or the folder is no model.
    """
    if config.model.tiny is not None:
        return
    if config.model.path is None:
        raise UserError("no model: 'model.path' is not set", "add model.path=FOLDER, a Hugging Face model folder")
    check_model_folder(Path(config.model.path), "model.path", scores)


def check_rollout_model(config: TrainConfig) -> None:
    """Check that the rollout engine serves the actor with the weights that are trained.

    Raises:
        UserError: it does not (see `engines.served`).
    """
    if config.model.path is not None:
        folder = Path(config.model.path)
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        check_served(settings, weight_shapes(folder), f"model.path: {folder}")


def check_model_folder(folder: Path, key: str, scores: bool = False) -> None:
    """Check that `folder` looks like a Hugging Face model folder, of a model that packed training runs rightly.

    `scores`: it is, or becomes, a reward model, which has no language head.

    Raises:
        UserError: it does not exist, a file is missing or damaged, or see `engines.architecture`.
    """
    if not folder.is_dir():
        raise UserError(
            f"{key}: there is no folder {folder}", f"set {key} to a Hugging Face model folder on this machine"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {folder} has no config.json", "name the folder that holds config.json itself")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{key}: {folder} has no *.safetensors weights", "save the model with save_pretrained()")
    if not any(folder.glob("tokenizer*")):
        raise UserError(
            f"{key}: {folder} has no tokenizer", "save the tokenizer beside the model with save_pretrained()"
        )
    try:
        read_shape(folder)
    except KeyError as error:
        raise UserError(
            f"{key}: {folder / 'config.json'} has no {error}", "name the folder of a decoder-only language model"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{key}: {folder} is damaged: {error}", "copy it anew; in a Git clone, 'git lfs pull'"
        ) from None
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_architecture(settings, weight_shapes(folder), f"{key}: {folder}", head=not scores)


def check_one_label(folder: Path, key: str) -> None:
    """Check that a model folder, if it is a classifier, has one label: a score.

    Raises:
        UserError: it has several.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    labels = len(settings.get("id2label", "01"))  # what a file does not say are two
    if labels != 1 and any("ForSequenceClassification" in name for name in settings.get("architectures") or ()):
        raise UserError(
            f"{key}: {folder} is a classifier with {labels} labels; a reward model has one, the score",
            "start from a language model, or from a reward model",
        )


def check_targets(config: TrainConfig) -> None:
    """Check that the layers that are to get adapters exist.

    Raises:
        UserError: a model has no layer of such a name.
    """
    model = config.model.path
    paths = {"actor": model, "critic": (config.critic and config.critic.path) or model, "sft": model}
    for key, path in paths.items():
        trainer: TrainerConfig | None = getattr(config, key)
        if trainer is None or trainer.lora is None:
            continue
        known = set(tiny_shape(config).matrices) if path is None else layer_names(Path(path))
        if unknown := sorted(set(trainer.lora.targets or ()) - known):
            raise UserError(
                f"{key}.lora.targets names '{unknown[0]}', and the model has no such layer",
                f"name linear layers of its blocks: {', '.join(sorted(known))}",
            )


def check_prompts(config: TrainConfig, frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """Check the rows of each split; return the columns that reward functions can ask for.

    Raises:
        UserError: a missing column, or a row without a prompt.
    """
    data = config.data
    if data.arithmetic is not None:
        return list(ARITHMETIC_COLUMNS)
    columns = _columns(data, frames["train"], str(data.train))
    if absent := sorted(set(columns) - set(_columns(data, frames["heldout"], str(data.heldout)))):
        raise UserError(
            f"data.heldout lacks the column '{absent[0]}' that data.train has", "give both the same columns"
        )
    return ["prompt_id", *columns]


def check_agents(config: TrainConfig, frame: pd.DataFrame) -> None:
    """Check that every training row is for one of the agents.

    Raises:
        UserError: one is not, or there is no such column.
    """
    data, agents = config.data, config.data.agents
    if agents is None:
        return
    agent_numbers(frame, agents, "data.arithmetic" if data.train is None else data.train)


def check_chat(config: TrainConfig) -> None:
    """Check that the model can be talked to: a chat template in its tokenizer's settings or in a file of its own.

    Raises:
        UserError: it has none.
    """
    folder = Path(config.model.path) if config.model.path is not None else None
    if folder is not None:
        settings = folder / "tokenizer_config.json"
        inside = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        if inside or any(folder.glob("chat_template*")):
            return
    raise UserError(
        f"data.chat is set, and {folder or 'a tiny model'} has no chat template",
        "use an instruction-tuned model, or data.chat=false with a data.template",
    )


def _columns(data: DataConfig, frame: pd.DataFrame, name: str) -> list[str]:
    require_columns(frame, [data.prompt], name)
    require_filled(frame, data.prompt, name)
    refuse_reserved(frame, name)
    return list(frame.columns)


def check_pairs(config: TrainConfig) -> None:
    """Check the supervised data.

    Raises:
        UserError: no source, an unreadable row, a missing column.
    """
    data = config.data
    if data.arithmetic is not None:
        return
    if data.sft is None or data.response is None:
        missing = "data.sft" if data.sft is None else "data.response"
        raise UserError(f"the 'sft' section needs '{missing}'", f"add {missing}, or remove the section with sft=null")
    require_columns(read_rows(Path(data.sft)), [data.prompt, data.response], data.sft)


def check_environment(config: TrainConfig) -> None:
    """Check that the environment loads.

    Raises:
        UserError: it does not.
    """
    if config.environment is not None:
        load_environment(config.environment)


def check_reward(config: TrainConfig, columns: list[str]) -> None:
    """Check that there is a reward, and that it loads or that its server answers.

    Raises:
        UserError: it does not.
    """
    if config.reward.model is not None:
        check_model_folder(Path(config.reward.model), "reward.model", scores=True)
        return
    if config.reward.judge is not None:
        check_judge(config.reward, columns)
        return
    if config.reward.service is not None:
        check_service(config.reward.service)
        return
    if config.environment is not None and not config.reward.given:
        return  # whether an environment gives rewards shows in the first batch
    if config.reward.function is None:
        raise UserError(
            "no reward: none of 'reward.function', 'reward.model', 'reward.judge' and 'reward.service' is set",
            "add reward.function=module:function, e.g. rewards.builtin:exact_match",
        )
    load_reward_function(config.reward.function, config.reward.settings, columns)


def check_memory(config: TrainConfig) -> list[GroupEstimate]:
    """Place the groups and compare each rank's estimated memory with what is free.

    Raises:
        UserError: a GPU does not exist, a rank would not fit, or see `check_zero_stage`.
    """
    shape = _shape(config)
    needed = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if needed > shape.positions:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens is {needed}, "
            f"the model has {shape.positions} positions",
            "lower one of them",
        )
    check_tensor_parallel(config.rollout.tensor_parallel, shape)
    estimates = estimate_groups(config)
    trained: tuple[tuple[str, TrainerConfig | None, Role], ...] = (
        ("actor", config.actor, "actor"),
        ("critic", config.critic, "critic"),
        ("sft", config.sft, "actor"),
    )
    for section, trainer, role in trained:
        check_zero_stage(config, estimates, section, trainer, role)
    _require_all(config, estimates)
    return estimates


def check_finetuning_memory(config: TrainConfig, section: str, scores: bool = False) -> None:
    """Place the ranks of a training without rollout and compare their estimated memory with what is free.

    Args:
        config: with the section `sft`, which alone is trained.
        section: what the user calls it.
        scores: whether it is a reward model, which has no language head.

    Raises:
        UserError: as for `check_memory`.
    """
    estimates = estimate_groups(config, PHASES["sft"], scores)
    check_zero_stage(config, estimates, section, config.sft, "actor")
    _require_all(config, [item for item in estimates if "actor" in item.roles], section)


def check_zero_stage(
    config: TrainConfig, estimates: list[GroupEstimate], section: str, trainer: TrainerConfig | None, role: Role
) -> None:
    """Check that DeepSpeed trains the weights of `role` at the section's stage.

    Raises:
        UserError: stage 0 for bfloat16 weights, beside which it keeps no float32 gradients there.
    """
    for estimate in estimates:
        device = "cpu" if estimate.devices[0] is None else "cuda"
        if trainer is None or trainer.zero_stage or role not in estimate.roles or weight_width(config, device) == 4:
            continue
        raise UserError(
            f"{section}.zero_stage=0 is for float32 weights, and those of group '{estimate.group}' are bfloat16",
            f"set {section}.zero_stage=1, which on a single rank is the same, or model.dtype=float32",
        )


def _require_all(config: TrainConfig, estimates: list[GroupEstimate], section: str | None = None) -> None:
    """Compare with what is free; `section` is what the user calls the trained one, else the fullest phase tells."""
    gpus, host_free = visible_gpus(), free_host_bytes()
    for estimate in estimates:
        for gpu in estimate.devices:
            if gpu is not None:
                _require(config, estimate, free_gpu_bytes(gpus[gpu]), f"GPU {gpu}", section)
            else:
                _require(config, estimate, host_free, "this machine", section)
                host_free -= estimate.memory.total


def check_tensor_parallel(ranks: int, shape: ModelShape) -> None:
    """Check that vLLM can cut the model over the ranks of one rollout engine.

    Raises:
        UserError: heads or MLP cannot be divided.
    """
    uneven = [name for name in ("heads", "intermediate_size") if getattr(shape, name) % ranks]
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        uneven.append("kv_heads")
    if uneven:
        sizes = ", ".join(f"{getattr(shape, name)} {name}" for name in uneven)
        raise UserError(
            f"rollout.tensor_parallel={ranks}: the model's {sizes} cannot be spread evenly",
            "use a number that divides heads and intermediate_size, and divides kv_heads or is a multiple of them",
        )


def estimate_groups(config: TrainConfig, phase: str | None = None, scores: bool = False) -> list[GroupEstimate]:
    """Return every group's placement and memory, and what the memory that is free now decides.

    Args:
        phase: the only one that there is (of `PHASES`); None: all, and the fullest counts.
        scores: see `engines.memory.Rank`.

    Raises:
        UserError: a GPU does not exist.
    """
    gpus = visible_gpus()
    specs = place(config, len(gpus), Path())
    cpu_ranks = sum(item.gpu is None for spec in specs for item in spec.devices)
    estimates = []
    for spec in specs:
        devices = tuple(item.gpu for item in spec.devices)
        free = min(free_host_bytes() // cpu_ranks if gpu is None else free_gpu_bytes(gpus[gpu]) for gpu in devices)
        device = "cpu" if devices[0] is None else "cuda"
        shapes = {role: _shape(config, role) for role in config.roles if role in spec.roles}
        gated = device == "cuda" and all(has_gated_products(gpus[gpu]) for gpu in devices if gpu is not None)
        rank = Rank(shapes, len(devices), device, weight_width(config, device), scores, gated)
        recomputed = choose_recomputed(config, rank, free)
        decided = decide_sleep(config, rank, recomputed, free)
        memory = rank_memory(decided, rank, recomputed, phase)
        estimates.append(GroupEstimate(spec.name, spec.roles, devices, memory, recomputed, decided.rollout.sleep))
    return estimates


def disk_bytes(config: TrainConfig) -> int:
    """Return about how many bytes the checkpoints and the exported model of a run take.

    A checkpoint holds weights and AdamW's float32 state of every trained role, and the weights of a reference that is
    refreshed; one more than is kept exists while it is written. Left out: experience, which depends on what is said.
    """
    width = weight_width(config, "cuda" if visible_gpus() else "cpu")
    trained = _shape(config).trained_parameters(config.actor.lora)
    if config.critic is not None:
        critics = max(1, len(config.agents))
        trained += critics * _shape(config, "critic").trained_parameters(config.critic.lora)
    kl, weights = config.algorithm.kl, _shape(config).parameters * width
    reference = weights if kl is not None and kl.refresh_every is not None else 0
    checkpoints = config.checkpoint.keep + 1 if config.checkpoint.every else 0
    return checkpoints * (trained * (width + 12) + reference) + weights


def _shape(config: TrainConfig, role: Role = "actor") -> ModelShape:
    if role == "critic" and config.critic is not None and config.critic.path is not None:
        return read_shape(Path(config.critic.path))
    if role == "reward":
        return read_shape(Path(str(config.reward.model)))
    return tiny_shape(config) if config.model.tiny is not None else read_shape(Path(str(config.model.path)))


def _require(config: TrainConfig, estimate: GroupEstimate, free: int, place_name: str, section: str | None) -> None:
    memory = estimate.memory
    if memory.total <= free:
        return
    model = next((name for name, phase in PHASES.items() if phase == memory.phase), "actor")
    section = section or model
    part = max(memory.parts, key=lambda name: memory.parts[name])
    training = (
        f"use more ranks or a higher {section}.zero_stage, {_smaller_passes(config, model, section)}, "
        f"{section}.gradient_checkpointing=true where it is false, or end what else uses the memory"
    )
    caching = "lower rollout.kv_cache_gib or rollout.max_sequences, remove rollout.sleep=false where it is given, or "
    raise UserError(
        f"group '{estimate.group}' needs about {memory.total / GIB:.1f} GiB per rank ({memory.phase}), "
        f"{place_name} has {free / GIB:.1f} GiB free "
        f"(largest part: {part}, {memory.parts[part] / GIB:.1f} GiB)",
        (caching if part == "KV cache" else "") + training,
    )


def _smaller_passes(config: TrainConfig, model: str, section: str) -> str:
    """Say what makes the largest micro-batch smaller: its budget, or where one row alone exceeds that the row."""
    trainer: TrainerConfig = getattr(config, model)
    if isinstance(trainer, SftConfig):
        longest, keys = trainer.max_tokens, f"{section}.max_tokens"
    else:
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        keys = "data.max_prompt_tokens or rollout.max_response_tokens"
    return f"a smaller {keys if longest >= largest(trainer.micro_batch_tokens) else f'{section}.micro_batch_tokens'}"


def tiny_shape(config: TrainConfig) -> ModelShape:
    """Return the sizes of the tiny model that the run will make."""
    tiny = config.model.tiny
    assert tiny is not None
    vocabulary, head = 64, tiny.hidden_size // tiny.heads
    attention = 2 * tiny.hidden_size * head * (tiny.heads + tiny.kv_heads) + 2 * head
    block = attention + 3 * tiny.hidden_size * tiny.intermediate_size + 2 * tiny.hidden_size
    embeddings = vocabulary * tiny.hidden_size * (1 if tiny.tie_embeddings else 2)
    return ModelShape(
        parameters=tiny.layers * block + embeddings + tiny.hidden_size,
        layers=tiny.layers,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        head_size=head,
        vocabulary=vocabulary,
        positions=tiny.max_positions,
        query_key_norms=True,
        model_type="qwen3",
    )


def check_supervised(config: TrainConfig) -> None:
    """Check what the `sft` flow alone needs.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config)
    if config.sft is None:
        raise UserError("there is no 'sft' section", "add one, e.g. sft.steps=400")
    check_pairs(config)
