"""How much memory a rank will need, from the model's sizes alone: no torch, no weights loaded.

A rank's memory is full at different times for different reasons, so the estimate is made by phase, and the fullest
one counts: the warm-up, each trained role's update, the rollout, forward passes, the start. It refuses what cannot
fit, decides what the backward pass recomputes, and is shown by `--dry-run`; measured peaks are in every run's metrics.

The numbers are of three kinds, each with its place: bytes per parameter that ZeRO prescribes (`_states`), bytes per
token that autograd keeps (penstock/engines/sizing/activations.py), and the workspaces and allowances below. The last
are what is to be measured anew when kernels or libraries change. Left out: other processes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.configs.sections.trainer import ActorConfig, SftConfig, TogetherConfig, TrainerConfig
from penstock.configs.tree.schedule import largest
from penstock.engines.families.shape import KV_BLOCK, ModelShape
from penstock.engines.groups.placement import reference_is_base, reshard_strategy
from penstock.engines.groups.slots import SLOTS
from penstock.engines.rollout.batch_sizes import CPU_KV_CACHE_LIMIT, GPU_KV_CACHE_SHARE, max_sequences
from penstock.engines.sizing.activations import (
    Computation,
    MicroBatch,
    fullest_block,
    host_bytes,
    in_flight_bytes,
    kept_bytes,
    keys_per_token,
)
from penstock.engines.sizing.optimizer_states import master_bytes, state_bytes

GIB = 1 << 30
Parts = dict[str, int]  # bytes by what they are for

LIBRARIES = {"cpu": int(1.2 * GIB), "cuda": int(0.75 * GIB)}  # on a GPU: CUDA's context, outside of torch's allocator
NCCL = int(0.5 * GIB)  # buffers of its channels, with several ranks
CUDA_GRAPHS = 1 * GIB  # vLLM's captured graphs and workspace; they stay while its engine sleeps
FRAGMENTATION = 0.05  # share of what comes and goes on a GPU that torch reserves on top and cannot use
FLEETING = ("activations", "backward pass", "reduce buckets")  # what comes and goes; all other parts stay
LOGITS_CHUNK = 1 << 30  # bytes of logits that exist at a time (penstock/engines/kernels/lm_head.py)
LOGITS_CHUNKS = {"cuda": 2, "cpu": 8}  # the chunk and its gradient; where nothing is compiled, float32 copies as well
# DeepSpeed's defaults, in elements. A GPU's bucket is allocated whole however small the model is, and there are two to
# overlap; on a CPU pages that nothing is written to are no memory.
REDUCE_BUCKET = 500_000_000
BUCKETS = {"cuda": 2, "cpu": 1}
LIVE_PARAMETERS = 1_000_000_000  # that ZeRO-3 holds gathered
SUB_GROUP = 1_000_000_000  # elements that ZeRO-3 steps at a time
GRADIENT = 4  # bytes: gradients are summed up in float32
FEATURES = 256 << 20  # that a model keeps of images at most (penstock/engines/models/seeing.py)
MOST_IN_A_BYTE = 255  # experts of a layer (penstock/engines/rollout/routing/capture.py)
USEFUL_SEQUENCES = 16  # with room for fewer at a time a rollout takes too long to be worth it
ROOM_TO_STAY = 0.92  # share of free memory that an estimate may fill with a KV cache that stays; gaps need the rest
SCORED_TOKENS = 16384  # of a reward model's micro-batch
# Chunks that layers with a state compute per chunk of rows, at most (penstock/engines/batches/row_groups.py). Counted
# for tokens it is too little of many rows much shorter than a chunk.
PADDED = 2.0

PHASES = {"actor": "update of the actor", "critic": "update of the critic", "sft": "supervised warm-up"}


@dataclass(frozen=True)
class Rank:
    """What a rank's memory depends on besides the configuration."""

    shapes: Mapping[Role, ModelShape]  # of the group's models
    ranks: int  # of the group
    device: str  # "cpu" or "cuda"
    width: int  # bytes of a weight
    scores: bool = False  # what is trained offline has a score in place of its language head
    gated_mlp: bool = False  # its GPU has the kernels of penstock/engines/kernels/gated_mlp.py
    ranks_on_host: int = 1  # of the group
    rollout_ranks: int | None = None  # of all groups that generate and stay; None: this group's
    free: int = sys.maxsize  # bytes of its GPU before it starts


@dataclass(frozen=True)
class Recomputed:
    """What a trained model's backward pass computes again, to save memory; each costs a share of the forward pass."""

    activations: bool  # gradient checkpointing
    logits: bool

    def __str__(self) -> str:
        return ", ".join(name for name, value in vars(self).items() if value) or "nothing"


@dataclass(frozen=True)
class RankMemory:
    """Estimated bytes on one rank in its fullest phase."""

    phase: str
    parts: Parts

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def weight_width(config: TrainConfig, device: str) -> int:
    """Return the bytes of one weight."""
    full = config.model.dtype == "float32" or (config.model.dtype == "auto" and device == "cpu")
    return 4 if full else 2


def rank_memory(
    config: TrainConfig, rank: Rank, recomputed: Mapping[str, Recomputed], only: str | None = None
) -> RankMemory:
    """Return the fullest phase, or the phase `only` if the group has it.

    `recomputed` is by "actor", "critic" and "sft" as `choose_recomputed` has it.
    """
    phases = rank_phases(config, rank, recomputed)
    name = only if only in phases else max(phases, key=lambda phase: sum(phases[phase].values()))
    return RankMemory(name, {part: size for part, size in phases[name].items() if size})


def slot_bytes(config: TrainConfig, rank: Rank, on_host: int) -> int:
    """Return what the slots of a rank take of its host's memory: the trained state, once for each.

    Args:
        on_host: ranks of the group on its host, which share what each of them holds whole.
    """
    states = {}
    for name, trainer in _trained(config, rank).items():
        shape = _shape(name, rank)
        one = master_bytes(trainer, shape) + state_bytes(trainer, shape)
        states[name] = _models(name, config) * one // (rank.ranks if trainer.zero_stage else on_host)
    warm_up, kl = states.pop("sft", 0), config.algorithm.kl
    state = max(warm_up, sum(states.values()))
    if kl is not None and kl.refresh_every is not None and "reference" in rank.shapes:
        state += rank.width * rank.shapes["reference"].parameters
    return SLOTS * state


def offloaded_bytes(config: TrainConfig, rank: Rank) -> int:
    """Return what a rank on a GPU keeps in its host's memory, the warm-up's or what follows it.

    That is what moves there between updates, in locked pages of powers of two, and what lives there for good. The
    inputs of blocks of several models are never there together.
    """
    resting, inputs = dict[str, int](), dict[str, int]()
    for name, trainer in _trained(config, rank).items():
        resting[name] = _living_on_host(name, trainer, rank, _models(name, config))
        if trainer.offload_optimizer:
            resting[name] = 2 * _states(name, trainer, rank)[f"{name} masters and moments"]
        inputs[name] = _inputs_on_host(name, trainer, config, rank)
    warm_up = resting.pop("sft", 0) + inputs.pop("sft", 0)
    return max(warm_up, sum(resting.values()) + max(inputs.values(), default=0))


def _living_on_host(name: str, trainer: TrainerConfig, rank: Rank, models: int) -> int:
    """Return what ZeRO-Offload keeps: masters and states, sums of gradients twice, and shards of weights.

    DeepSpeed sums gradients in one tensor and steps on copies of groups of it. Of what lives in files masters and
    weights are in memory on their way there, before there is a gradient, and no page is locked.
    """
    if trainer.offload == "nothing":
        return 0
    shape = _shape(name, rank)
    part = shape.trained_parameters(trainer.lora) // rank.ranks
    if trainer.offload_folder is not None:
        weights = rank.width * part if trainer.offload == "all" else 0
        return models * max(master_bytes(trainer, shape) // rank.ranks + weights, GRADIENT * part)
    states = (state_bytes(trainer, shape) + master_bytes(trainer, shape)) // rank.ranks
    groups, left = divmod(part, SUB_GROUP)
    copies = groups * locked(GRADIENT * SUB_GROUP) + locked(GRADIENT * left)
    weights = locked(rank.width * part) if trainer.offload == "all" else 0
    return models * (states + locked(GRADIENT * part) + copies + weights)


def folder_bytes(config: TrainConfig, rank: Rank) -> dict[str, int]:
    """Return what a rank keeps in files, by their folder: the warm-up's, or what follows it."""
    warm_up, rest = Counter[str](), Counter[str]()
    for name, trainer in _trained(config, rank).items():
        if trainer.offload_folder is not None:
            size = _models(name, config) * _in_files(trainer, rank, _shape(name, rank))
            (warm_up if name == "sft" else rest)[trainer.offload_folder] += size
    return dict(warm_up | rest)  # the larger of both


def _in_files(trainer: TrainerConfig, rank: Rank, shape: ModelShape) -> int:
    weights = rank.width * shape.trained_parameters(trainer.lora) if trainer.offload == "all" else 0
    return (state_bytes(trainer, shape) + master_bytes(trainer, shape) + weights) // rank.ranks


def locked(size: int) -> int:
    """Return the bytes that torch takes for page-locked memory: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _inputs_on_host(name: str, trainer: TrainerConfig, config: TrainConfig, rank: Rank) -> int:
    """Return the inputs of blocks that wait in host memory, each in page-locked memory of its own."""
    if not trainer.offload_activations:
        return 0
    shape = _shape(name, rank)
    computation = _computation(trainer, rank, shape, Recomputed(activations=True, logits=True))
    micro_batch = _share(trainer, shape, _largest_micro_batch(trainer, config, shape))
    return shape.layers * locked(host_bytes(shape, computation, micro_batch) // shape.layers)


def choose_recomputed(config: TrainConfig, rank: Rank, free: int) -> dict[str, Recomputed]:
    """Return for each trained model of a group what its backward pass recomputes.

    It recomputes as little as lets the model's own phase fit into `free` bytes. A configuration that decides about
    activations is obeyed.
    """
    levels = {name: _levels(name, trainer, config, rank) for name, trainer in _trained(config, rank).items()}
    most = {name: choices[-1] for name, choices in levels.items()}

    def fits(name: str, level: Recomputed) -> bool:
        return sum(rank_phases(config, rank, {**most, name: level})[PHASES[name]].values()) <= free

    return {
        name: next((level for level in choices if fits(name, level)), choices[-1]) for name, choices in levels.items()
    }


def decide_sleep(config: TrainConfig, rank: Rank, recomputed: Mapping[str, Recomputed], free: int) -> TrainConfig:
    """Return the configuration with `rollout.sleep` decided, for a group with a rollout engine on GPUs.

    The KV cache stays if the fullest phase, with the cache of all sequences, fits into `free` bytes with room to spare,
    where a rollout goes on beside the update on what is complete of it, and where the next one needs what is in it.
    Nothing more is recomputed for its sake.
    """
    if config.rollout.sleep is not None or rank.device == "cpu" or "rollout" not in rank.shapes:
        return config
    stays, sleeps = (_with_sleep(config, sleep) for sleep in (False, True))
    if config.learns_beside or config.rollout.keeps_kv_cache:
        return stays
    return stays if rank_memory(stays, rank, recomputed).total <= ROOM_TO_STAY * free else sleeps


def _with_sleep(config: TrainConfig, sleep: bool) -> TrainConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"sleep": sleep})})


def _levels(name: str, trainer: TrainerConfig, config: TrainConfig, rank: Rank) -> list[Recomputed]:
    """What there is to choose from, fastest first."""
    head, levels = _has_head(name, rank), []
    if not trainer.gradient_checkpointing:
        if head and not (name == "actor" and config.algorithm.full_kl):  # a full KL keeps the logits of two models
            levels.append(Recomputed(activations=False, logits=False))
        levels.append(Recomputed(activations=False, logits=head))
    if trainer.gradient_checkpointing is not False:
        levels.append(Recomputed(activations=True, logits=head))
    return levels


def _has_head(name: str, rank: Rank) -> bool:
    """Whether a trained model has logits; a critic's and a reward model's head has a single output."""
    return not (name == "critic" or (name == "sft" and rank.scores))


def rank_phases(config: TrainConfig, rank: Rank, recomputed: Mapping[str, Recomputed]) -> dict[str, Parts]:
    """Return a rank's parts in each phase."""
    trained = {name: trainer for name, trainer in _trained(config, rank).items() if name != "sft"}
    rest = _rest(config, rank, trained)
    phases: dict[str, Parts] = {"start": _start(config, rank, trained)}
    for name, trainer in trained.items():
        states = _states(name, trainer, rank, _models(name, config))
        if trainer.offload_optimizer:  # of several models one at a time has them back
            states[f"{name} masters and moments"] //= _models(name, config)
        own = _update(name, trainer, config, rank, recomputed[name]) | states
        phases[PHASES[name]] = (rest if rank.device == "cpu" or _stays(config) else _asleep(rest)) | own
    if config.sft is not None and "actor" in rank.shapes:
        own = _states("sft", config.sft, rank) | _update("sft", config.sft, config, rank, recomputed["sft"])
        phases[PHASES["sft"]] = own | _features(config, rank, 1)  # before the other models are loaded
    if "rollout" in rank.shapes:
        phases["rollout"] = {**rest, "KV cache": kv_cache_bytes(config, rank)}
    if {"reference", "reward"} & rank.shapes.keys():
        phases["forward passes"] = {**rest, "activations": _forward(config, rank)}
    return {name: _with_allowances(parts, config, rank) for name, parts in phases.items()}


def _stays(config: TrainConfig) -> bool:
    return config.rollout.sleep is False


def _asleep(rest: Parts) -> Parts:
    """Return the parts without the rollout engine's own weights, which leave the GPU with its KV cache."""
    return {part: size for part, size in rest.items() if part != "rollout weights"}


def _trained(config: TrainConfig, rank: Rank) -> dict[str, TrainerConfig]:
    if not config.trains:
        return {}
    named = {
        "actor": config.actor if "actor" in rank.shapes else None,
        "critic": config.critic if "critic" in rank.shapes else None,
        "sft": config.sft if "actor" in rank.shapes else None,
    }
    return {name: trainer for name, trainer in named.items() if trainer is not None}


def _models(name: str, config: TrainConfig) -> int:
    """How many models a trained role has: several agents have a critic each."""
    return max(1, len(config.agents)) if name == "critic" else 1


def _shape(name: str, rank: Rank) -> ModelShape:
    return rank.shapes["critic" if name == "critic" else "actor"]


def _states(name: str, trainer: TrainerConfig, rank: Rank, models: int = 1) -> Parts:
    """Return weights and optimizer states of `count` equal models while they are on the device, as ZeRO shards them."""
    shape, stage = _shape(name, rank), trainer.zero_stage
    weights, trained = shape.parameters + shape.adapter_parameters(trainer.lora), shape.trained_parameters(trainer.lora)
    weights, trained = weights - experts_elsewhere(trainer, shape), trained - experts_elsewhere(trainer, shape)
    own = rank.width == 4 and stage == 0  # float32 weights are their own masters without ZeRO
    masters = state_bytes(trainer, shape) + (0 if own else master_bytes(trainer, shape))
    states = {
        f"{name} weights": rank.width * weights // (rank.ranks if stage >= 3 else 1),
        f"{name} masters and moments": masters // (rank.ranks if stage >= 1 else 1),
    }
    elsewhere = rank.device == "cuda" or trainer.offload_folder is not None
    if elsewhere and trainer.offload != "nothing":
        del states[f"{name} masters and moments"]
    if elsewhere and trainer.offload == "all":
        del states[f"{name} weights"]
    if in_fp8(trainer):
        states[f"{name} weights in FP8"] = _fp8_bytes(shape)
    if trainer.hpz:
        states[f"{name} weights of the host"] = rank.width * weights // rank.ranks_on_host
    if stage <= 1 and rank.width == 2:  # DeepSpeed's other optimizer: it keeps a buffer of all gradients for good
        states[f"{name} gradients"] = GRADIENT * trained
    return {part: models * size for part, size in states.items()}


def _rest(config: TrainConfig, rank: Rank, trained: Mapping[str, TrainerConfig]) -> Parts:
    """Return what lies on the device all the time, without offloaded states."""
    parts: Parts = {}
    for name, trainer in trained.items():
        states = _states(name, trainer, rank, _models(name, config))
        if trainer.offload_optimizer:
            del states[f"{name} masters and moments"]
        parts |= states
    frozen: tuple[Role, ...] = ("reference", "reward") if config.trains else ("actor", "reference", "reward")
    for role in frozen:
        if role in rank.shapes and not (role == "reference" and reference_is_base(config, rank.shapes)):
            parts[role] = rank.width * rank.shapes[role].parameters
            if role == "reference" and config.trains and config.actor.fp8:
                parts["reference in FP8"] = _fp8_bytes(rank.shapes[role])
    if "actor" in rank.shapes and "reference" not in rank.shapes and config.algorithm.full_kl:
        parts["reference head"] = rank.width * rank.shapes["actor"].vocabulary * rank.shapes["actor"].hidden_size
    if "rollout" in rank.shapes and _stays(config):
        parts["KV cache"] = kv_cache_bytes(config, rank)
    models = {"actor", "critic", "reference"} & rank.shapes.keys()
    models -= {"reference"} if reference_is_base(config, rank.shapes) else set()
    parts |= _features(config, rank, len(models))
    if "rollout" in rank.shapes and config.actor.replays:
        parts["experts of the rollout"] = _route_bytes(config, rank)
    if "rollout" in rank.shapes:
        shape, shared = rank.shapes["rollout"], reshard_strategy(config) == "shared"
        own = shape.merged_parameters(config.actor.lora) if shared else shape.parameters
        merged = shared and config.actor.lora is not None and config.actor.lora.experts  # and counted so
        apart = shape.family.transposed or (shared and experts_elsewhere(config.actor, shape))
        own += shape.expert_parameters if apart and not merged else 0  # vLLM has copies of them
        size = rank.width * own // config.rollout.tensor_parallel
        size += shape.block_matrices if config.rollout.weights == "fp8" else 0  # a byte of each, beside them
        parts |= {"rollout weights": size} if size else {}
    return parts


def _features(config: TrainConfig, rank: Rank, models: int) -> Parts:
    """Return what models keep of the images that they have seen, while their encoder rests."""
    kept = rank.device == "cuda" and config.data.image_column is not None and not config.model.train_encoder
    return {"features of images": FEATURES * models} if kept else {}


def _update(name: str, trainer: TrainerConfig, config: TrainConfig, rank: Rank, recomputed: Recomputed) -> Parts:
    """What an update needs besides the states.

    The most is needed at the end of the forward pass, when all activations wait, or a little later. The head's backward
    pass comes first, so its logits are gone when the first block's begins, and all activations are gone when the
    optimizer steps.
    """
    shape, stage = _shape(name, rank), trainer.zero_stage
    micro_batch = _share(trainer, shape, _largest_micro_batch(trainer, config, shape))
    computation = _computation(trainer, rank, shape, recomputed)
    trained = shape.trained_parameters(trainer.lora)
    gradients = GRADIENT * (trained // rank.ranks if stage >= 2 else trained - experts_elsewhere(trainer, shape))
    if trainer.offload != "nothing":  # summed in host memory, and copied there for the step unless the rest is in files
        copies = 1 if trainer.offload_folder is None else 0
        gradients = 0 if rank.device == "cuda" else (1 + copies) * gradients
    waiting = kept_bytes(shape, computation, micro_batch)
    if not recomputed.activations:
        waiting += _kept_by_adapters(trainer, rank, shape, micro_batch)
    if name == "actor" and config.algorithm.full_kl:
        waiting += _reference_states(rank, shape, micro_batch)
    head = _head(trainer, rank, shape, micro_batch, recomputed) if _has_head(name, rank) else 0
    block = in_flight_bytes(shape, computation, micro_batch)
    copied = gradients - waiting if stage == 2 else 0  # when it steps it copies the sums into one tensor
    return {
        f"{name} gradients": gradients,
        "reduce buckets": _buckets(trained - experts_elsewhere(trainer, shape), trainer, rank),
        "activations": waiting,
        "backward pass": max(head, block, copied),
    }


def _computation(trainer: TrainerConfig, rank: Rank, shape: ModelShape, recomputed: Recomputed) -> Computation:
    """How an update computes its model."""
    stage = trainer.zero_stage
    # DeepSpeed's optimizer with sums, and all weights of the blocks trained
    # (penstock/engines/kernels/weight_gradients.py).
    summed = stage < 2 and rank.width == 2 and trainer.lora is None
    return Computation(
        width=rank.width,
        device=rank.device,
        compiled=rank.device == "cuda" and stage < 3,
        gated=(rank.gated_mlp or in_fp8(trainer)) and summed and bool(shape.family.gated_mlps),
        checkpointing=recomputed.activations,
        exchanged=ranks_together(trainer) > 1,
        on_host=trainer.offload_activations and rank.device == "cuda",
    )


def in_fp8(trainer: TrainerConfig) -> bool:
    """Whether a model's blocks compute in FP8."""
    return isinstance(trainer, ActorConfig) and trainer.fp8


def _fp8_bytes(shape: ModelShape) -> int:
    """Return what the weights of all blocks take in FP8, once for each pass; their scales are a thousandth of that."""
    return 2 * shape.block_matrices


def _kept_by_adapters(trainer: TrainerConfig, rank: Rank, shape: ModelShape, micro_batch: MicroBatch) -> int:
    """Return the outputs of every adapter's A, which the gradient of its B needs."""
    if trainer.lora is None:
        return 0
    adapters = shape.adapters(trainer.lora)
    if trainer.lora.experts and shape.experts is not None:
        adapters += 2 * shape.mixtures * shape.experts.chosen  # of gate and up together, and of down
    return rank.width * micro_batch.tokens * trainer.lora.rank * adapters


def _reference_states(rank: Rank, shape: ModelShape, micro_batch: MicroBatch) -> int:
    """Return the reference's final hidden states of this micro-batch and of the next one, which is packed ahead."""
    return 2 * rank.width * micro_batch.responses * shape.hidden_size


def _head(
    trainer: TrainerConfig, rank: Rank, shape: ModelShape, micro_batch: MicroBatch, recomputed: Recomputed
) -> int:
    """Return what the head's backward pass needs: logits, and its weight's gradient unless the weight is frozen."""
    logits = rank.width * shape.vocabulary * micro_batch.responses
    chunk = min(LOGITS_CHUNK, logits)
    gradient = rank.width * shape.vocabulary * shape.hidden_size if trainer.lora is None else 0
    return (LOGITS_CHUNKS[rank.device] - 1) * chunk + (chunk if recomputed.logits else logits) + gradient


def _largest_micro_batch(trainer: TrainerConfig, config: TrainConfig, shape: ModelShape | None = None) -> MicroBatch:
    """Return the largest possible micro-batch: a row is never cut, so a row beyond the budget is one by itself.

    `shape`: of the model, where it matters how its layers with a state pad rows.
    """
    tokens = max(1, largest(trainer.budget))
    if isinstance(trainer, SftConfig):
        tokens = max(tokens, trainer.max_tokens)
        padded = PADDED * _whole_chunks(shape, trainer.max_tokens)
        return MicroBatch(tokens, responses=tokens, padded=padded)  # all of its tokens may be response tokens
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    paths = 1 if config.environment is None else min(config.environment.max_paths, config.environment.max_turns)
    chunks = _whole_chunks(shape, prompt + response)
    if prompt + response > tokens:
        return MicroBatch(prompt + response, responses=response, keys=float(paths), padded=chunks)
    samples = config.rollout.samples
    responses = tokens * samples * response // (prompt + samples * response)
    keys = keys_per_token(prompt, response, samples)
    if paths > 1:  # each has the keys of all before it
        keys = max(keys, paths * (prompt + response) / tokens)
    return MicroBatch(tokens, responses, keys, PADDED * chunks)


def _whole_chunks(shape: ModelShape | None, longest: int) -> float:
    """Return what a row of so many tokens is padded to, as a multiple, where layers with a state take whole chunks."""
    chunk = 1 if shape is None or shape.states is None else shape.states.chunk
    return -(-longest // chunk) * chunk / longest


def ranks_together(trainer: TrainerConfig) -> int:
    """Return how many ranks compute each micro-batch of a model together."""
    return trainer.sequence_parallel if isinstance(trainer, TogetherConfig) else 1


def experts_elsewhere(trainer: TrainerConfig, shape: ModelShape) -> int:
    """Return how many parameters of experts a rank leaves to others."""
    ranks = trainer.expert_parallel if isinstance(trainer, ActorConfig) else 1
    return shape.expert_parameters // ranks * (ranks - 1)


def _share(trainer: TrainerConfig, shape: ModelShape, whole: MicroBatch) -> MicroBatch:
    """Return what of a micro-batch one rank computes.

    Attention has a part of the heads of all tokens, as many numbers as all heads of a part of the tokens; heads of keys
    fewer than the ranks are there several times. All tokens of a share may be response tokens.
    """
    ranks = ranks_together(trainer)
    tokens = -(-whole.tokens // ranks)
    keys = whole.keys * max(1.0, ranks / shape.kv_heads)
    return replace(whole, tokens=tokens, responses=min(whole.responses, tokens), keys=keys) if ranks > 1 else whole


def _buckets(trained: int, trainer: TrainerConfig, rank: Rank) -> int:
    """Return the buffers of gradients on their way to other ranks, and of ZeRO-3's gathered parameters."""
    stage, fetched = trainer.zero_stage, rank.ranks > 1 or trainer.offload == "all"
    if stage == 0 or (stage == 1 and rank.width == 2):
        return 0  # in bfloat16 stage 1 is DeepSpeed's other optimizer, which adds each gradient at once
    elements = REDUCE_BUCKET if rank.device == "cuda" else min(REDUCE_BUCKET, trained)
    gathered = min(LIVE_PARAMETERS, trained) if stage == 3 and fetched else 0
    return rank.width * (BUCKETS[rank.device] * elements + gathered)


def _start(config: TrainConfig, rank: Rank, trained: Mapping[str, TrainerConfig]) -> Parts:
    """Return what the start needs at its fullest moment.

    Models are loaded one after another. While the last one's parameters move into DeepSpeed's flat buffer they are
    there twice, but its optimizer's state is not there yet.
    """
    if not trained:
        return _rest(config, rank, trained)
    *before, last = trained
    rest = _rest(config, rank, {name: trained[name] for name in before})
    weights, models = f"{last} weights", _models(last, config)
    shape, trainer = _shape(last, rank), trained[last]
    moved = rank.width * (shape.trained_parameters(trainer.lora) - experts_elsewhere(trainer, shape))
    if trainer.offload != "nothing":  # sharded parameter by parameter on the way from host memory
        moved = rank.width * shape.vocabulary * shape.hidden_size
    in_memory = trainer.model_copy(update={"offload_folder": None})  # as all is that goes to files
    parts = {weights: _states(last, in_memory, rank, models).get(weights, 0), "flattening": moved}
    if rank.device == "cpu" and trainer.offload_folder is not None:
        parts[f"{last} masters"] = master_bytes(trainer, shape) // rank.ranks
    return rest | parts


def _forward(config: TrainConfig, rank: Rank) -> int:
    """Return what a forward pass needs: one block at a time, nothing kept for a backward pass."""
    computation, asked = Computation(rank.width, rank.device), _largest_micro_batch(config.actor, config).tokens
    if "actor" in rank.shapes and config.trains:
        asked = -(-asked // config.actor.sequence_parallel)  # the reference follows the actor beside it
    tokens: dict[Role, int] = {"reference": asked, "reward": scored_tokens(config)}
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return max(
        count * fullest_block(shape, computation, padded=PADDED * _whole_chunks(shape, longest))
        for role, count in tokens.items()
        if (shape := rank.shapes.get(role)) is not None
    )


def scored_tokens(config: TrainConfig) -> int:
    """Return the token budget of a reward model's micro-batch: its tokenizer may make two tokens of each of a row."""
    return max(SCORED_TOKENS, 2 * (config.data.max_prompt_tokens + config.rollout.max_response_tokens))


def kv_cache_bytes(config: TrainConfig, rank: Rank) -> int:
    """Return the KV cache that was asked for, else what its sequences at full length need.

    Of a cache that comes and goes a useful least: it takes what there is. One that stays on a GPU has all sequences'.
    """
    if config.rollout.kv_cache_gib:
        return int(config.rollout.kv_cache_gib * GIB)
    shape, parallel, most = rank.shapes["rollout"], config.rollout.tensor_parallel, _sequences(config, rank)
    wanted = most + 1 if rank.device == "cuda" and _stays(config) else min(USEFUL_SEQUENCES, most)
    return shape.kv_cache_bytes(wanted, _longest(config), rank.width, parallel, rank.device == "cuda")


def _route_bytes(config: TrainConfig, rank: Rank) -> int:
    """Return what a rollout engine keeps of the experts of each token of its KV cache, also while that is away.

    A cache is at most what all sequences need, on a CPU `CPU_KV_CACHE_LIMIT`, and on a GPU a share of what is free
    when the engine starts.
    """
    experts = rank.shapes["rollout"].experts
    if experts is None:
        return 0
    of_token = rank.shapes["rollout"].kv_numbers(config.rollout.tensor_parallel) * rank.width
    tokens = -(-_longest(config) // KV_BLOCK) * KV_BLOCK * (_sequences(config, rank) + 1)
    if config.rollout.kv_cache_gib:
        tokens = int(config.rollout.kv_cache_gib * GIB) // of_token
    else:
        limit = CPU_KV_CACHE_LIMIT if rank.device == "cpu" else int(GPU_KV_CACHE_SHARE * rank.free)
        tokens = min(tokens, limit // of_token)
    width = 1 if experts.count <= MOST_IN_A_BYTE else 2
    return tokens * rank.shapes["rollout"].mixtures * experts.chosen * width


def _sequences(config: TrainConfig, rank: Rank) -> int:
    """Return how many sequences a rollout engine decodes at a time."""
    ranks = rank.rollout_ranks or rank.ranks
    return max_sequences(config.rollout, ranks // config.rollout.tensor_parallel)


def _longest(config: TrainConfig) -> int:
    """Return the tokens of a sequence at full length."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _with_allowances(parts: Parts, config: TrainConfig, rank: Rank) -> Parts:
    outside = {"libraries": LIBRARIES[rank.device]}
    if rank.device == "cpu":
        return parts | outside
    if rank.ranks > 1:
        outside["NCCL"] = NCCL
    if "rollout" in rank.shapes:
        outside["rollout engine"] = CUDA_GRAPHS if config.rollout.cuda_graphs else CUDA_GRAPHS // 2
    fleeting = sum(parts.get(name, 0) for name in FLEETING)
    return {**parts, "fragmentation": int(FRAGMENTATION * fleeting), **outside}
