"""How a family's routers weigh the experts that a token takes, for those whose routes can be replayed.

Their routers are a softmax over all experts, of which a token takes the likeliest; some then divide by these ones' sum.
tests/engines/models/test_replay.py holds it against the library. Left out: routers with groups of experts, biases or
sigmoids; the replay itself (penstock/engines/models/replay.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REPLAYED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # model types


def weights_add_up_to_one(settings: Mapping[str, Any]) -> bool:
    """Whether the weights of a token's experts are divided by their sum; Mixtral has no setting, and does."""
    return bool(settings.get("norm_topk_prob", True))
