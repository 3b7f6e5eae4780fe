"""Checks of the model: its folder, its family, its chat template and the layers that get adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from packaging.version import Version

from penstock.base.errors import UserError
from penstock.base.model_code import Code
from penstock.checks.model_code import check_own_class, check_own_code, check_trust
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.configs.sections.trainer import CriticConfig, TrainerConfig
from penstock.engines.families.architecture import (
    STATE_ON_GPU,
    STATES_ON_GPUS,
    check_architecture,
    classifies,
    unpackable,
)
from penstock.engines.families.attention import (
    FLASH_HEAD,
    FLASH_MULTIPLE,
    FLEX_COMPARED,
    FLEX_HEAD,
    FLOAT32,
    INSTEAD_OF_4,
    NO_FLEX,
    NOBODY,
    NOT_COMPARED,
    needs_flex,
    no_flash_kernel,
    of_other_device,
)
from penstock.engines.families.fp8 import refuse_device, refuse_model, refuse_one_sided
from penstock.engines.families.images import IMAGES_ON_GPUS, NO_IMAGES_ON_GPUS, sees
from penstock.engines.families.longest_row import longest_row
from penstock.engines.families.routing import NO_REPLAY_ON_GPUS, REPLAY_ON_GPUS, REPLAYED
from penstock.engines.families.served import cpu_head_sizes
from penstock.engines.families.shape import (
    ModelShape,
    expert_names,
    layer_names,
    read_settings,
    read_shape,
    weight_shapes,
)
from penstock.engines.families.table import MAMBA, Family, family_of
from penstock.engines.families.tiny import tiny_shape
from penstock.engines.groups.machine import gpu_name, is_hopper, visible_gpus
from penstock.engines.groups.placement import reshard_strategy
from penstock.engines.sizing.memory import weight_width

SCAN_BY_PRODUCTS = Version("5.18")  # of the Transformers library


def check_model(config: TrainConfig, scores: bool = False, pairs: bool = False) -> None:
    """Check that the actor, or the reward model with `scores`, has a starting point.

    `pairs`: it is trained on preferences, in groups that the flow makes.

    Raises:
        UserError: none is configured, or the folder is no model.
    """
    check_optimizers(config)
    if config.data.image_column is not None and visible_gpus() and not IMAGES_ON_GPUS:
        raise UserError(*NO_IMAGES_ON_GPUS)
    if config.model.tiny is not None:
        check_attention(config)
        return
    if config.model.path is None:
        raise UserError("no model: 'model.path' is not set", "add model.path=FOLDER, a Hugging Face model folder")
    check_trust(config.model)
    check_model_folder(Path(config.model.path), "model.path", scores, config.model.code)
    check_sight(Path(config.model.path), config.data.image_column)
    if pairs:
        check_no_states(Path(config.model.path), "a reward model" if scores else "preferences")
    check_states(config)
    check_exact_shards(config)
    check_attention(config)


def check_sight(folder: Path, column: str | None) -> None:
    """Check that a model sees images exactly if rows have some, in a `column`.

    Raises:
        UserError: it does not, or its folder lacks what makes images ready.
    """
    able = sees(read_settings(folder))
    if column is not None and not able:
        raise UserError(
            f"data has images (column '{column}'), and the model in {folder} sees none that Penstock knows",
            "use a model of a family with images: docs/models.md, Images",
        )
    if column is None and able:
        raise UserError(
            f"the model in {folder} sees images, and the rows have none", "name their column with data.images"
        )
    if able and not (folder / "preprocessor_config.json").is_file():
        raise UserError(
            f"{folder} has no preprocessor_config.json, which says how images become pixels",
            "copy it from the original",
        )


def refuse_sight(path: str | None, why: str) -> None:
    """Refuse a model folder with an encoder of images where it would have nothing to see.

    Raises:
        UserError: it has one.
    """
    if path is not None and (Path(path) / "config.json").is_file() and sees(read_settings(Path(path))):
        raise UserError(f"the model in {path} sees images, and {why}", "use a model of text")


def check_states(config: TrainConfig) -> None:
    """Refuse what nobody has compared yet of a model whose layers carry a state from token to token.

    Raises:
        UserError: names it.
    """
    critic = None if config.critic is None else config.critic.path
    for key, path in (("critic.path", critic), ("reward.model", config.reward.model)):
        if path is not None and _carries_states(Path(path)):
            raise UserError(
                f"{key}: the model in {path} has layers that carry a state from token to token, and scores of such a "
                "model are not compared yet",
                "use another model",
            )
    folder = Path(str(config.model.path))
    if not _carries_states(folder):
        return
    trained = [one for one in (config.actor, config.critic, config.sft) if one is not None] if config.trains else []
    given = {
        "environment": config.environment is not None,
        "groups": bool(config.groups),
        "a critic": config.trains and config.critic is not None,
        **{f"rollout.{name}": getattr(config.rollout, name) is not None for name in ("tail", "carry", "stream")},
        "rollout.tensor_parallel above 1": config.rollout.tensor_parallel > 1,
        "sequence_parallel": any(getattr(one, "sequence_parallel", 1) > 1 for one in trained),
        "expert_parallel": any(getattr(one, "expert_parallel", 1) > 1 for one in trained),
        "zero_stage 3": any(one.zero_stage == 3 for one in trained),
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise UserError(
            f"the model in {folder} has layers that carry a state from token to token, and does not go with "
            f"{', '.join(names)}: that trainer and rollout agree there is not shown yet",
            "remove it, or use another model",
        )


def check_no_states(folder: Path, purpose: str) -> None:
    """Refuse a model whose layers carry a state from token to token where nobody has compared what is trained.

    Raises:
        UserError: names the purpose.
    """
    if _carries_states(folder):
        raise UserError(
            f"the model in {folder} has layers that carry a state from token to token, and does not go with {purpose}: "
            "what such layers learn there is not compared yet",
            "use another model",
        )


def _carries_states(folder: Path) -> bool:
    return (folder / "config.json").is_file() and bool(family_of(read_settings(folder).get("model_type", "")).mixers)


def check_served_alone(folder: Path) -> None:
    """Check that vLLM's own server, without what Penstock changes in vLLM, serves what was trained.

    Raises:
        UserError: its layers carry a state, and nobody has compared the two; or vLLM 0.32 computes it wrongly on a CPU,
            as one head of LFM2 and of latent attention, and corrections of routers without groups.
    """
    settings = read_settings(folder)
    family = family_of(settings.get("model_type", ""))
    if family.mixers:
        raise UserError(
            f"the model in {folder} has layers that carry a state from token to token, and nobody has compared vLLM's "
            "own server with the trainer",
            "generate with penstock evaluate, or use another model",
        )
    if not visible_gpus() and (settings.get("kv_lora_rank") or family.corrected and not settings.get("n_group")):
        raise UserError(
            f"the model in {folder} is not what vLLM's own server would compute on a CPU",
            "generate with penstock evaluate, serve it on a GPU, or use another model",
        )


def check_served_images(folder: Path) -> None:
    """Check that vLLM's own server can make images ready for a model that sees.

    Raises:
        UserError: it sees, and the library for that is not installed.
    """
    if sees(read_settings(folder)) and find_spec("torchvision") is None:
        raise UserError(
            f"the model in {folder} sees images, for which vLLM's own server needs torchvision", "install torchvision"
        )


def check_model_folder(
    folder: Path, key: str, scores: bool = False, code: Code | None = None, compares: bool = False
) -> None:
    """Check that `folder` looks like a Hugging Face model folder, of a model that packed training runs rightly.

    `scores`: it is, or becomes, a reward model, which has no language head. `code`: of models, that is trusted.
    `compares`: trainer and vLLM are about to be compared, so it may be what nobody has compared on GPUs yet.

    Raises:
        UserError: it does not exist, a file is missing or damaged, or see `penstock.engines.families.architecture`.
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
    check_own_code(folder, key, code)
    check_own_class(folder, key, scores)
    settings = read_settings(folder)
    check_architecture(settings, weight_shapes(folder), f"{key}: {folder}", head=not scores)
    check_kernel(folder, key, settings, compares)


def check_optimizers(config: TrainConfig) -> None:
    """Check that the package is installed that has an optimizer.

    Raises:
        UserError: it is not.
    """
    trained = [trainer for trainer in (config.actor, config.critic, config.sft) if trainer is not None]
    for trainer in trained if config.trains else ():
        name, package = trainer.optimizer.name, trainer.optimizer.package
        if package is not None and find_spec(package) is None:
            raise UserError(
                f"optimizer.name={name} needs the package {package}, which is not installed",
                f"pip install '{package}>=0.50', or the extra 'optimizers' of penstock, wherever ranks are",
            )


def check_one_label(folder: Path, key: str) -> None:
    """Check that a model folder, if it is a classifier, has one label: a score.

    Raises:
        UserError: it has several.
    """
    settings = read_settings(folder)
    labels = len(settings.get("id2label", "01"))  # a configuration without labels has two
    if labels != 1 and classifies(settings):
        raise UserError(
            f"{key}: {folder} is a classifier with {labels} labels; a reward model has one, the score",
            "start from a language model, or from a reward model",
        )


def check_router_loss(config: TrainConfig) -> None:
    """Check that an actor whose loss is to spread tokens over experts has some, and chooses them by routers' logits.

    Raises:
        UserError: it has none, or does not.
    """
    if not config.algorithm.router_loss_coefficient:
        return
    settings = {} if config.model.path is None else read_settings(Path(config.model.path))
    model_type = settings.get("model_type", "")
    family = family_of(model_type)
    if not family.experts:
        raise UserError(
            "algorithm.router_loss_coefficient has no effect: the model has no experts",
            "remove it, or train a mixture of experts (docs/models.md)",
        )
    if family.corrected:
        raise UserError(
            f"algorithm.router_loss_coefficient is for routers that choose by their logits: those of {model_type}"
            " correct their choice",
            "remove it",
        )


def check_routing(config: TrainConfig) -> None:
    """Check that an actor that is to take the rollout's experts has some, and that they can be recorded.

    Raises:
        UserError: it has none, its family's routers are not known, or there is a GPU.
    """
    if not config.actor.replays:
        return
    settings = {} if config.model.path is None else read_settings(Path(config.model.path))
    model_type = settings.get("model_type", "")
    if not family_of(model_type).experts:
        raise UserError(
            "actor.routing=replay has no effect: the model has no experts",
            "remove it, or train a mixture of experts (docs/models.md)",
        )
    if model_type not in REPLAYED:
        raise UserError(
            f"actor.routing=replay: routes of '{model_type}' cannot be replayed, but those of {', '.join(REPLAYED)}",
            "remove it",
        )
    if visible_gpus() and not REPLAY_ON_GPUS:
        raise UserError(*NO_REPLAY_ON_GPUS)


def check_targets(config: TrainConfig, offline: str | None = None) -> None:
    """Check that the layers and experts that are to get adapters exist.

    Args:
        offline: what the user calls the section `sft`, where that alone is trained.

    Raises:
        UserError: a model has no layer of such a name, or no experts that are known.
    """
    trained: dict[str, TrainerConfig | None] = {"actor": config.actor, "critic": config.critic, "sft": config.sft}
    if offline is not None:
        trained = {offline: config.sft}
    for key, trainer in trained.items():
        if trainer is None or trainer.lora is None:
            continue
        path = (trainer.path if isinstance(trainer, CriticConfig) else None) or config.model.path
        known = layer_names(Path(path)) if path is not None else _tiny_layers(config)
        if unknown := sorted(set(trainer.lora.targets or ()) - known):
            _refuse_target(f"{key}.lora", unknown[0], known, path)
        if trainer.lora.experts:
            _check_experts_to_adapt(key, path, config.model.code)


def _refuse_target(key: str, name: str, known: set[str], path: str | None) -> NoReturn:
    remedy = f"name linear layers of its blocks: {', '.join(sorted(known))}"
    if path is not None and name in expert_names(Path(path)):
        raise UserError(
            f"{key}.targets names '{name}', and in this model only experts have such",
            f"{key}.experts=true (of a policy); or {remedy}",
        )
    raise UserError(f"{key}.targets names '{name}', and the model has no such layer", remedy)


def _check_experts_to_adapt(key: str, path: str | None, code: Code | None) -> None:
    """Check that the model in a folder, or a tiny one, has experts as the table knows them.

    Raises:
        UserError: it has not.
    """
    settings = {} if path is None else read_settings(Path(path))
    if not family_of(settings.get("model_type", "")).experts:
        raise UserError(
            f"{key}.lora.experts has no effect: the model has no experts, or none that are known here",
            "remove it, or train a mixture of experts of the table in docs/models.md",
        )
    if code is not None:
        raise UserError(
            f"{key}.lora.experts is not for a model with code of its own, whose experts are not known", "remove it"
        )


def _tiny_layers(config: TrainConfig) -> set[str]:
    assert config.model.tiny is not None
    return set(tiny_shape(config.model.tiny).matrices)


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


def check_attention(config: TrainConfig) -> None:
    """Check that there can be the kernel of attention that is named; of ranks elsewhere these say it when they start.

    Raises:
        UserError: it is not one for this machine's devices, or for heads of the actor's size.
    """
    kernel, gpus = config.model.attention, visible_gpus()
    if any(group.hosts for group in config.groups.values()):
        return
    why = flex_alone(config) if gpus else ""
    if gpus and not FLEX_COMPARED:
        if kernel == "flex":
            raise UserError(*NO_FLEX)
        if why == FLOAT32:
            raise UserError(f"model.dtype=float32 needs FlexAttention on a GPU: {NOBODY} with it", "leave it out")
        why = ""  # of models that need it the checks of their folders say so
    if kernel == "auto" and not why:
        return
    if (kernel == "sdpa") == bool(gpus):
        raise UserError(*of_other_device(kernel, gpu=bool(gpus)))
    shape = shape_of(config)
    if kernel in ("auto", "flex"):
        _check_heads_of_flex(why, shape)
        return
    if why:
        raise UserError(*no_flash_kernel(kernel, why))
    if kernel == "flash_attention_4" and (older := [gpu for gpu in gpus if not is_hopper(gpu)]):
        raise UserError(
            f"model.attention={kernel} is for Hopper GPUs, and GPU {older[0]} is a {gpu_name(older[0])}", INSTEAD_OF_4
        )
    size = shape.head_size
    if kernel != "sdpa" and (size > FLASH_HEAD or size % FLASH_MULTIPLE):
        raise UserError(
            f"model.attention={kernel}: the model has attention heads of {size} numbers; FlashAttention computes "
            f"multiples of {FLASH_MULTIPLE} up to {FLASH_HEAD}",
            "use another model",
        )


def _check_heads_of_flex(why: str, shape: ModelShape) -> None:
    """Check that heads are as large as FlexAttention computes them.

    Args:
        why: a model needs it; empty: it is named.

    Raises:
        UserError: those of keys or of values are smaller.
    """
    size = min(shape.head_size, shape.latent.value if shape.latent is not None else shape.head_size)
    if size >= FLEX_HEAD:
        return
    needed = f"the model {why}, which on a GPU needs FlexAttention" if why else "model.attention=flex"
    raise UserError(
        f"{needed}: that computes heads of at least {FLEX_HEAD} numbers, and the model's have {size}",
        "use another model" if why else "leave it out",
    )


def flex_alone(config: TrainConfig) -> str:
    """Return what a model does that on a GPU FlexAttention alone computes; empty: nothing, or vLLM alone computes it.

    A folder that is none is refused elsewhere.
    """
    if weight_width(config, "cuda") == 4 and set(config.roles) != {"rollout"}:
        return FLOAT32
    critic = None if config.critic is None else config.critic.path
    folders = [Path(path) for path in (config.model.path, critic, config.reward.model) if path is not None]
    settings = (read_settings(folder) for folder in folders if (folder / "config.json").is_file())
    return next(filter(None, map(needs_flex, settings)), "")


def takes_float32(device: str) -> bool:
    """Whether what is trained on a device may have float32 weights: on a GPU it needs FlexAttention then."""
    return device == "cpu" or FLEX_COMPARED


def check_fp8(config: TrainConfig) -> None:
    """Check that what is asked to compute in FP8 can; of GPUs of other machines ranks say it when they start.

    Raises:
        UserError: it is asked of trainer or rollouts alone, or it is not for these devices or this model.
    """
    if not config.in_fp8:
        return
    refuse_one_sided(config)
    if not any(group.hosts for group in config.groups.values()):
        gpus = visible_gpus()
        if others := [gpu_name(gpu) for gpu in gpus if not is_hopper(gpu)] if gpus else ["CPU"]:
            refuse_device(config, others[0])
    refuse_model(config, shape_of(config))


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


def check_heads(section: str, ranks: int, shape: ModelShape) -> None:
    """Check that ranks that compute a micro-batch together can share a model's attention out.

    Args:
        section: the key of the trained model's section.
        ranks: its `sequence_parallel`.

    Raises:
        UserError: heads cannot be divided, or it is a mixture of experts.
    """
    if ranks == 1:
        return
    key = f"{section}.sequence_parallel"
    if shape.experts is not None:
        raise UserError(
            f"{key}={ranks} is not for mixtures of experts: how evenly all tokens of a micro-batch use them is not "
            "summed over ranks",
            f"remove {key}, and use shorter rows or {section}.gradient_checkpointing=true",
        )
    divided = shape.heads % ranks == 0, shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0
    names = [name for name, even in zip(("heads", "kv_heads"), divided, strict=True) if not even]
    if names:
        sizes = ", ".join(f"{getattr(shape, name)} {name}" for name in names)
        raise UserError(
            f"{key}={ranks}: the model's {sizes} cannot be spread evenly, and each rank computes attention of a part "
            "of them",
            "use a number that divides heads, and divides kv_heads or is a multiple of them",
        )


def check_expert_parallel(config: TrainConfig, ranks: int) -> None:
    """Check that the ranks of the actor's group can share out the experts of its layers.

    Raises:
        UserError: it has none, or neither they nor the ranks make even shares.
    """
    if (count := config.actor.expert_parallel) == 1:
        return
    key, experts = f"actor.expert_parallel={count}", shape_of(config).experts
    if experts is None:
        raise UserError(f"{key} has no effect: the model has no experts", "remove it, or train a mixture of experts")
    if config.model.code is not None:
        raise UserError(f"{key} is not for a model with code of its own, whose experts are not known", "remove it")
    if ranks % count:
        raise UserError(
            f"{key} does not divide the {ranks} ranks of the actor's group",
            "so many ranks share out each layer's experts: change one of the two numbers",
        )
    if experts.count % count:
        raise UserError(
            f"{key}: the {experts.count} experts of a layer cannot be shared out evenly",
            "use a number that divides them",
        )


def check_longest_row(config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Check that no row is longer than the trainer and the rollout engine compute it alike.

    Raises:
        UserError: prompts and responses together may be longer.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = longest_row(settings)
    if longest is not None and prompt + response > longest.tokens:
        raise UserError(
            f"model.path: a prompt of {prompt} tokens and a response of {response} have {prompt + response}, and "
            f"beyond {longest.tokens} {longest.beyond}",
            "reduce data.max_prompt_tokens or rollout.max_response_tokens",
        )


def check_kernel(folder: Path, key: str, settings: Mapping[str, Any], compares: bool = False) -> None:
    """Check that a GPU of this machine, if there is one, may compute the model's layers.

    What needs FlexAttention may not until that is compared there, nor layers with a state until a training is seen.

    Args:
        compares: trainer and vLLM are about to be compared, so both may.

    Raises:
        UserError: it may not, or the library would need too much memory for it.
    """
    if not visible_gpus():
        return
    family, where = family_of(settings.get("model_type", "")), f"{key}: {folder}"
    if (why := family.flex_alone or needs_flex(settings)) and not (FLEX_COMPARED or compares):
        raise unpackable(where, f"{why}, {NOT_COMPARED}")
    if family.mixers and not (STATES_ON_GPUS or compares):
        raise unpackable(where, STATE_ON_GPU)
    check_scan(where, family)


def check_scan(where: str, family: Family) -> None:
    """Check that the library computes Mamba 2 by products: older ones write out each pair of tokens for all of a state.

    Raises:
        UserError: it does not, and a GPU has no memory for that.
    """
    if family.stacked == MAMBA and Version(version("transformers")) < SCAN_BY_PRODUCTS:
        raise UserError(
            f"{where} has layers of Mamba 2, for which transformers {version('transformers')} needs a number of each "
            "state for each pair of tokens in a chunk",
            f"install transformers {SCAN_BY_PRODUCTS} or newer",
        )


def check_corrections(config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Check that the numbers by which an actor's routers correct their choice reach vLLM as they are, in float32.

    Beside bfloat16 weights they do where vLLM takes them from the actor's own memory. DeepSpeed's shards and what is
    sent to another group have one dtype: there they would be rounded, and other experts would be chosen.

    Raises:
        UserError: they do not, or it is not known.
    """
    width = weight_width(config, "cuda" if visible_gpus() else "cpu")
    if not family_of(settings.get("model_type", "")).corrected or width == 4:
        return
    what = f"model.path: routers of {settings['model_type']} correct their choice of experts in float32"
    remedy = "set model.dtype=float32, or use another mixture (docs/models.md)"
    if visible_gpus():
        remedy = remedy if FLEX_COMPARED else "use another mixture (docs/models.md)"  # float32 needs FlexAttention
        raise UserError(f"{what}, which beside bfloat16 weights nobody has compared on GPUs", remedy)
    if reshard_strategy(config) != "shared":
        raise UserError(f"{what}, and beside bfloat16 weights they would be rounded on their way to vLLM", remedy)


def check_exact_shards(config: TrainConfig) -> None:
    """Check that no trained model's shards round by what its routers correct their choice: ZeRO-3's have one dtype.

    Raises:
        UserError: they do.
    """
    device = "cuda" if visible_gpus() else "cpu"
    if not config.trains or weight_width(config, device) == 4:
        return
    for trainer in (config.actor, config.critic, config.sft):
        path = getattr(trainer, "path", None) or config.model.path
        if trainer is None or trainer.zero_stage < 3 or path is None:
            continue
        if family_of(read_settings(Path(path)).get("model_type", "")).corrected:
            raise UserError(
                f"zero_stage 3: routers of the model in {path} correct their choice of experts in float32, and beside "
                "bfloat16 weights its shards would round that",
                f"set another zero_stage{', or model.dtype=float32' if takes_float32(device) else ''}",
            )


def check_head_size(config: TrainConfig) -> None:
    """Check that vLLM computes the actor's attention on a CPU; what GPUs compute is not looked at.

    Raises:
        UserError: there is no GPU, and vLLM's attention on the CPU does not know heads of this size.
    """
    if config.model.tiny is not None:
        remedy = "change model.tiny.hidden_size or model.tiny.heads: a head has hidden_size / heads numbers"
        refuse_head_size(shape_of(config), remedy)
    else:
        refuse_head_size(shape_of(config))


def refuse_head_size(shape: ModelShape, remedy: str = "use a model with other heads, or a GPU") -> None:
    """Check likewise a model of these sizes.

    Raises:
        UserError: as above.
    """
    size, known = shape.head_size, cpu_head_sizes()
    if visible_gpus() or not known or size in known:
        return
    sizes = ", ".join(map(str, sorted(known)))
    raise UserError(f"the model has attention heads of {size} numbers; on a CPU, vLLM computes {sizes}", remedy)


def shape_of(config: TrainConfig, role: Role = "actor") -> ModelShape:
    """Return the sizes of the model of a role."""
    if role == "reward":
        return read_shape(Path(str(config.reward.model)))
    tiny, path = config.model.tiny, str(config.model.path)
    if role == "critic" and config.critic is not None and config.critic.path is not None:
        tiny, path = None, config.critic.path
    shape = tiny_shape(tiny) if tiny is not None else read_shape(Path(path))
    return replace(shape, encoder_learns=config.model.train_encoder)
