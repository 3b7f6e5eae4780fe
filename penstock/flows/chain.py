"""Chain: trainings that follow each other, each a child flow, where one may begin with what an earlier one leaves.

    check every stage -> stage 1 -> stage 2 -> ...

A stage trains as by itself (penstock/flows/sft.py, penstock/flows/preference.py, penstock/flows/reward_model.py,
penstock/flows/train.py), or selects the best of what a training has said. What is done stays done: `resume` goes on
with the stage that was broken off.
"""

from __future__ import annotations

from prefect import Flow, flow

from penstock.configs.chain import Stage
from penstock.configs.loading import fields as form
from penstock.flows.preference import preference
from penstock.flows.reward_model import reward_model
from penstock.flows.sft import sft
from penstock.flows.train import train
from penstock.session.chains.plan import begin_chain, config_of, selection_of, stages_left
from penstock.session.chains.running import running_chain, say_stage, unbegun
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.state.chain import ChainFolder
from penstock.tasks.chain.select_responses import select_responses

FLOWS: dict[str, Flow[..., str]] = {"sft": sft, "preference": preference, "reward-model": reward_model, "train": train}


@flow(name="chain", flow_run_name=run_name)
@ends_in_words
def chain(
    recipe: form.ChainFile = None, overrides: form.StageOverrides = None, resume: form.ResumedChain = None
) -> str:
    """Carry out the stages of a chain, one after the other; return the chain's folder.

    Raises:
        UserError: a stage cannot work; none has begun then, as far as it can be seen ahead.
    """
    folder = begin_chain(recipe, overrides, resume)
    with running_chain(folder):
        for stage in stages_left(folder):
            say_stage(folder, stage)
            carry_out(folder, stage)
    return str(folder.path)


def carry_out(folder: ChainFolder, stage: Stage) -> None:
    """Do what is left of a stage."""
    if stage.selects:
        run, config = selection_of(folder, stage)
        select_responses(run, config, folder.left_by(stage))
        return
    run_folder = str(folder.run(stage).path)
    if unbegun(folder, stage):
        FLOWS[stage.does](config=config_of(folder, stage), run_folder=run_folder)
    else:
        FLOWS[stage.does](resume=run_folder)
