"""Checkpoints without engines: a few bytes in place of weights."""

from __future__ import annotations

from pathlib import Path

from penstock.base.files import empty_beside
from penstock.state.digests import signed
from penstock.state.manifest import Manifest, seal_checkpoint
from penstock.state.run_folder import RunFolder

CONFIG = "name: a run\n"


def write_checkpoint(run: RunFolder, manifest: Manifest) -> Path:
    """Seal a checkpoint that holds `manifest`, under the name that it says; a run without a configuration gets one."""
    final = run.checkpoints / str(manifest.checkpoint)
    run.path.mkdir(parents=True, exist_ok=True)
    if not run.config.exists():
        run.config.write_text(signed(CONFIG), encoding="utf-8")
    if not run.prompt_rewards.exists():
        run.prompt_rewards.write_text('{"iteration": 1, "rollouts": []}\n', encoding="utf-8")
    aside = empty_beside(final)
    (aside / "state-main-0.safetensors").write_bytes(bytes(range(64)))
    (aside / "state-main-1.safetensors").write_bytes(b"state")
    seal_checkpoint(aside, final, run, manifest)
    return final
