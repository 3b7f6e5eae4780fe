"""Which causal LMs packed training runs as their authors meant: the others are refused before they are trained wrongly.

Sequences lie side by side in one run of tokens (penstock/engines/batches/packing.py): only an attention that is told
where they lie keeps them apart, and log-probs come from the language head's weight and bias
(penstock/engines/kernels/lm_head.py). What is looked at is the configuration and the names of the weights, so the
checks before anything starts need no torch. By which signs a family shows what it does: table.py.

Left out: what only a model's class says (penstock/engines/models/models.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.engines.families.images import of_decoder
from penstock.engines.families.longest_row import rope_types
from penstock.engines.families.table import family_of

REMEDY = "use another model, e.g. of the Llama, Qwen3 or Gemma 3 family"

STATE_IN_SHARES = "carries a state from token to token, of which ranks cannot compute parts"


def check_architecture(
    settings: Mapping[str, Any], weights: Iterable[str], where: str | Path, head: bool = True
) -> None:
    """Check that packed training provides all that a model does.

    Args:
        settings: its configuration.
        weights: names of its parameters.
        where: what the message calls it.
        head: whether its language head is used; a reward model has another.

    Raises:
        UserError: it does not.
    """
    family, settings = family_of(settings.get("model_type", "")), of_decoder(settings)
    if quantised := settings.get("quantization_config"):
        kind = quantised.get("quant_method", "of a kind that it does not tell")
        raise unpackable(where, f"has quantised weights ({kind}; save it in bfloat16 or float32 first)")
    if family.incomparable:
        why = f"{where} {family.incomparable}: nobody has compared what is trained with what generates"
        raise UserError(why, REMEDY)
    known = {*family.score_caps, *family.logit_factors, *family.logit_divisors, *family.logit_caps}
    looked_at = (*family.score_settings, *(family.logit_settings if head else ()))
    if changed := [name for name in looked_at if name not in known and settings.get(name) not in (None, 1.0)]:
        raise unpackable(where, f"sets '{changed[0]}', which changes scores or logits")
    if others := sorted(set(settings.get("layer_types") or ()).difference(family.layer_types)):
        raise unpackable(where, f"has layers of the type '{others[0]}', which does not keep packed sequences apart")
    if latents := [name for name in family.latent_settings if settings.get(name)]:
        raise unpackable(where, f"compresses keys and values (multi-head latent attention, '{latents[0]}')")
    if by_length := sorted(rope_types(settings).intersection(family.positions_by_length)):
        raise unpackable(where, f"has positions of the type '{by_length[0]}', which follow the longest of the rows")
    for name in weights:
        parts = name.split(".")
        if not set(family.state_weights).isdisjoint(parts):
            raise unpackable(where, f"has '{name}', part of a layer that carries a state from token to token")
        if parts[-1] in family.sink_weights:
            raise unpackable(where, f"has attention sinks ('{name}')")


def classifies(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a sequence classifier, which scores texts instead of continuing them."""
    return any("ForSequenceClassification" in name for name in settings.get("architectures") or ())


def unpackable(where: str | Path, what: str) -> UserError:
    """Return the error of a model that has, sets or is `what`."""
    return UserError(f"{where} {what}: packed training does not provide that", REMEDY)
