# ruff: noqa: E501
"""Which test shows what a configuration key does: a line for each key, or for several that one test is about.

A key without a line, a line without a key, and a line whose test is not there or does not use the key's name fail
tests/configs/test_every_key.py. In a pattern `*` stands for anything: sections that several models have (optimizer,
adapters) are read by the same code, so one test speaks for all of them. What each section decides by itself (a
learning rate, a token budget) has a line of its own. Tests are named below tests/.

A new key gets a test that fails without it, and a line here.
"""

from __future__ import annotations

TOLD = "tasks/test_what_ranks_are_told.py::test_of_"
SERVER = "penstock/rewards/test_server.py::test_"
SERVICE = "penstock/rewards/test_service.py::test_"
JUDGE = "penstock/rewards/test_judge.py::test_"
SCORING = "penstock/rewards/test_pool.py::test_"
SANDBOX = "penstock/rewards/test_sandbox.py::test_"
TRAINER = "engines/training/test_trainer.py::test_"
CORRECTION = "algorithms/test_correction.py::test_"
ESTIMATOR = "tasks/iteration/test_advantage_inputs.py::test_settings_reach_the_estimator"
RUN_FOLDER = "penstock/cli/test_main.py::test_the_run_folder_has_the_name_and_the_place_of_the_recipe"
DATA_FILES = "penstock/cli/test_main.py::test_wrong_data_is_named_by_its_line"
PAIR_FILES = "penstock/cli/test_main.py::test_pairs_for_the_warm_up_are_read_where_the_recipe_says"
PROBLEMS = "penstock/data/test_arithmetic.py::test_answers_are_sums_of_fixed_width"
PLACED = "engines/groups/test_placement.py::test_"
HOSTS = "penstock/session/test_hosts.py::test_"
GENERATOR = "engines/rollout/test_engine.py::test_"

TRAIN = {
    # ---- a run
    "base": "configs/loading/test_load.py::test_parameters_lie_over_the_recipes_they_name",
    "name": RUN_FOLDER,
    "folder": RUN_FOLDER,
    "seed": "flows/test_resume.py::test_another_seed_ends_elsewhere",
    "iterations": "flows/test_train_flow.py::test_the_run_folder_holds_all_that_was_made",
    # ---- the model
    "model.path": "penstock/cli/test_main.py::test_a_damaged_model_folder_is_refused",
    "model.tiny.*": "penstock/checks/test_tiny_shape.py::test_the_assumed_sizes_are_the_real_ones",
    "model.dtype": f"{TOLD}the_model_to_train",
    # ---- data
    "data.train": DATA_FILES,
    "data.heldout": "penstock/cli/test_main.py::test_held_out_prompts_are_read_where_the_recipe_says",
    "data.sft": PAIR_FILES,
    "data.arithmetic.digits": PROBLEMS,
    "data.arithmetic.sft": PROBLEMS,
    "data.arithmetic.train": PROBLEMS,
    "data.arithmetic.heldout": PROBLEMS,
    "data.arithmetic.mistakes": "penstock/data/test_arithmetic.py::test_a_careless_teacher_errs_in_one_digit_of_a_share_of_its_answers",
    "data.prompt": "penstock/data/test_prompts.py::test_plain_text_keeps_its_columns",
    "data.response": PAIR_FILES,
    "data.chat": "penstock/data/test_prompts.py::test_chat_has_one_bos",
    "data.chat_arguments": "penstock/data/test_prompts.py::test_arguments_reach_the_chat_template",
    "data.template": "penstock/data/test_prompts.py::test_a_template_is_filled_literally",
    "data.arithmetic.calls": "penstock/environments/test_calculator.py::test_demonstrations_hold_what_the_calculator_says",
    "data.agents.column": "penstock/data/test_agents.py::test_every_row_gets_its_agents_number",
    "data.agents.names": "penstock/data/test_agents.py::test_every_row_gets_its_agents_number",
    "data.sampler.name": f"{TOLD}a_rollout",
    "data.sampler.column": "penstock/data/test_samplers.py::test_a_curriculum_goes_from_easy_to_hard_in_every_epoch",
    "data.sampler.descending": "penstock/data/test_samplers.py::test_a_curriculum_goes_from_easy_to_hard_in_every_epoch",
    "data.sampler.half_life": "penstock/data/test_samplers.py::test_what_was_learnt_long_ago_is_forgotten",
    "data.sampler.reward_range": "penstock/data/test_samplers.py::test_rewards_are_read_within_their_range",
    "data.sampler.settings": "penstock/data/test_samplers.py::test_a_users_sampler_gets_what_it_asks_for",
    "data.max_prompt_tokens": "penstock/data/test_prompts.py::test_over_long_prompts_are_dropped_and_ids_stay",
    # ---- rewards
    "reward.function": f"{SCORING}columns_and_settings_reach_the_worker",
    "reward.settings": f"{SCORING}columns_and_settings_reach_the_worker",
    "reward.model": "engines/ranks/test_worker.py::test_each_rank_scores_its_own_texts_in_order",
    "reward.timeout_s": f"{SCORING}only_the_culprits_fail",
    "reward.workers": f"{SCORING}slow_rows_do_not_cost_a_worker",
    "reward.sandbox.memory_gib": f"{SANDBOX}what_uses_too_much_fails_alone_and_is_named",
    "reward.sandbox.processes": f"{SANDBOX}what_uses_too_much_fails_alone_and_is_named",
    "reward.sandbox.network": f"{SANDBOX}there_is_no_network_unless_it_is_asked_for",
    "reward.sandbox.read": f"{SANDBOX}of_other_folders_it_sees_what_the_recipe_names_and_nothing_of_the_run",
    "reward.sandbox.variables": f"{SANDBOX}variables_stay_outside_unless_the_recipe_names_them",
    "reward.failure_value": f"{SCORING}only_the_culprits_fail",
    "reward.max_failure_share": f"{SCORING}past_the_share_the_run_stops",
    "reward.overlong.*": "tasks/iteration/test_advantage_inputs.py::test_long_responses_lose_reward_and_failed_ones_keep_theirs",
    "reward.judge.url": SERVER + "an_address_may_end_as_openai_clients_write_it",
    "reward.judge.retries": SERVER + "what_may_pass_is_asked_again",
    "reward.judge.concurrency": SERVER + "as_many_as_allowed_are_asked_at_once_and_answers_keep_their_rows",
    "reward.judge.timeout_s": SERVER + "a_request_without_an_end_fails_at_its_deadline",
    "reward.judge.api_key_env": SERVER + "a_key_comes_from_the_environment_and_goes_nowhere_else",
    "reward.judge.model": JUDGE + "the_question_is_a_chat_or_a_text_to_continue",
    "reward.judge.chat": JUDGE + "the_question_is_a_chat_or_a_text_to_continue",
    "reward.judge.max_tokens": JUDGE + "the_question_is_a_chat_or_a_text_to_continue",
    "reward.judge.temperature": JUDGE + "the_question_is_a_chat_or_a_text_to_continue",
    "reward.judge.extra": JUDGE + "the_question_is_a_chat_or_a_text_to_continue",
    "reward.judge.template": JUDGE + "every_place_is_filled_once_and_other_braces_are_text",
    "reward.judge.pattern": JUDGE + "the_last_match_counts",
    "reward.judge.bounds": JUDGE + "only_the_culprits_fail_and_the_judges_words_are_kept",
    "reward.judge.scale": JUDGE + "only_the_culprits_fail_and_the_judges_words_are_kept",
    "reward.judge.parser": JUDGE + "a_parser_is_a_reward_function_of_the_judges_text",
    "reward.judge.settings": JUDGE + "a_parser_is_a_reward_function_of_the_judges_text",
    "reward.service.url": SERVER + "an_address_may_end_as_openai_clients_write_it",
    "reward.service.retries": SERVER + "what_may_pass_is_asked_again",
    "reward.service.concurrency": SERVER + "as_many_as_allowed_are_asked_at_once_and_answers_keep_their_rows",
    "reward.service.timeout_s": SERVER + "a_request_without_an_end_fails_at_its_deadline",
    "reward.service.api_key_env": SERVER + "a_key_comes_from_the_environment_and_goes_nowhere_else",
    "reward.service.batch": SERVICE + "texts_go_in_batches_and_scores_keep_their_rows",
    "reward.service.model": SERVICE + "a_training_starts_only_with_the_right_server",
    # ---- environments
    "environment.type": "penstock/environments/test_loading.py::test_every_episode_gets_an_object_of_its_own",
    "environment.settings": "penstock/environments/test_loading.py::test_every_episode_gets_an_object_of_its_own",
    "environment.max_turns": "engines/rollout/test_episodes.py::test_how_episodes_end",
    "environment.timeout_s": "penstock/environments/test_pool.py::test_a_failed_call_ends_its_episode_with_the_reason",
    "environment.sandbox.*": "penstock/environments/test_pool.py::test_episodes_live_in_a_sandbox_where_the_recipe_asks_for_one",
    "environment.workers": "penstock/environments/test_pool.py::test_a_lost_worker_takes_its_episodes_along_and_is_replaced",
    # ---- rollout
    "rollout.sleep": "engines/sizing/test_memory.py::test_a_role_costs_where_it_lives",
    "rollout.prompts": "engines/rollout/test_batch_sizes.py::test_an_engine_holds_its_share_at_once",
    "rollout.samples": f"{TOLD}the_actors_update",
    "rollout.max_response_tokens": f"{TOLD}the_actors_update",
    "rollout.temperature": f"{TOLD}the_actors_update",
    "rollout.carry.*": "penstock/session/rollout/test_rounds.py::test_what_is_carried_is_taken_once_and_no_older_than_it_may_be",
    "rollout.stream.extra": "penstock/session/rollout/test_rounds.py::test_what_is_carried_is_taken_once_and_no_older_than_it_may_be",
    "rollout.stream.keep_kv_cache": "engines/ranks/serving/test_serve.py::test_no_prefix_of_older_weights_is_found",
    "rollout.stream.staleness": "tasks/iteration/test_rollout.py::test_a_rollout_begins_before_the_update_on_the_one_before",
    "rollout.stream.portions": "penstock/session/rollout/test_portions.py::test_groups_come_in_the_order_in_which_their_last_responses_end",
    "rollout.tail.*": "penstock/session/rollout/test_rounds.py::test_every_prompt_is_taken_once_and_in_time",
    "rollout.top_p": f"{GENERATOR}nucleus_and_top_k_leave_out_the_tail",
    "rollout.top_k": f"{GENERATOR}nucleus_and_top_k_leave_out_the_tail",
    "rollout.ignore_eos": f"{GENERATOR}stop_tokens_can_be_ignored_for_benchmarks",
    "rollout.tensor_parallel": f"{GENERATOR}an_engine_is_started_as_the_recipe_says",
    "rollout.cuda_graphs": f"{GENERATOR}an_engine_is_started_as_the_recipe_says",
    "rollout.max_sequences": "engines/rollout/test_batch_sizes.py::test_an_engine_holds_its_share_at_once",
    "rollout.reproducible": "engines/rollout/test_decode_loop.py::test_two_engines_pull_all_prompts_once",
    "rollout.compare_every": "engines/ranks/test_logprob_gap.py::test_when_it_is_done",
    "rollout.max_logprob_gap": "engines/ranks/test_logprob_gap.py::test_a_rollout_engine_that_computes_otherwise_ends_the_run",
    "rollout.kv_cache_gib": f"{GENERATOR}the_kv_cache_holds_all_sequences_unless_told_otherwise",
    # ---- numerical faults
    "faults.gradient": "configs/sections/test_faults.py::test_by_default_a_gradient_may_be_odd_twice_in_a_row_and_nothing_else_is_looked_at",
    "faults.kl.*": "tasks/faults/test_faulty_trainings.py::test_a_batch_beyond_the_limit_is_not_learnt_from_and_the_third_in_a_row_ends_the_training",
    "faults.update_kl.*": "tasks/faults/test_faulty_trainings.py::test_an_update_that_went_too_far_is_undone_and_the_training_goes_on",
    "faults.entropy.*": "penstock/reports/test_faults.py::test_an_entropy_below_its_limit",
    "faults.reward.*": "penstock/reports/test_faults.py::test_a_reward_is_compared_with_the_best_of_the_last_iterations",
    # ---- the algorithm
    "algorithm.name": "tasks/iteration/test_advantage_inputs.py::test_remax_reads_the_reward_of_the_greedy_response",
    "algorithm.policy_loss": f"{TOLD}the_actors_update",
    "algorithm.mini_batches": f"{TOLD}the_actors_update",
    "algorithm.epochs": f"{TOLD}the_actors_update",
    "algorithm.aggregation": f"{TOLD}the_actors_update",
    "algorithm.entropy_coefficient": f"{TOLD}the_actors_update",
    "algorithm.kl.place": f"{TOLD}the_actors_update",
    "algorithm.kl.estimator": f"{TOLD}the_actors_update",
    "algorithm.kl.coefficient": f"{TOLD}the_actors_update",
    "algorithm.kl.target": "penstock/session/test_kl_control.py::test_an_adaptive_coefficient_moves_towards_the_target",
    "algorithm.kl.horizon": "penstock/session/test_kl_control.py::test_an_adaptive_coefficient_moves_towards_the_target",
    "algorithm.kl.ceiling": "penstock/session/test_kl_control.py::test_an_adaptive_coefficient_stays_below_its_ceiling",
    "algorithm.kl.refresh_every": "tasks/iteration/test_refresh_reference.py::test_it_is_due_every_so_many_iterations_but_the_last",
    "algorithm.advantage": ESTIMATOR,
    "algorithm.settings": "tasks/test_what_ranks_are_told.py::test_every_setting_reaches_its_function",
    "algorithm.dynamic_sampling.max_rollouts": "tasks/iteration/test_resample.py::test_rollouts_of_an_iteration_are_bounded",
    "algorithm.dynamic_sampling.*e*_re*": "penstock/session/rollout/test_refused_groups.py::test_groups_are_refused_by_their_rewards",
    "algorithm.dynamic_sampling.function": "penstock/session/rollout/test_refused_groups.py::test_groups_are_refused_by_their_rewards",
    "algorithm.dynamic_sampling.settings": "penstock/session/rollout/test_refused_groups.py::test_groups_are_refused_by_their_rewards",
    "algorithm.correction.proximal": "tasks/iteration/test_correction.py::test_the_rollouts_log_probs_become_the_old_ones_where_the_ratio_is_to_them",
    "algorithm.correction.weights": CORRECTION + "weights_are_the_bounded_ratios",
    "algorithm.correction.cap": CORRECTION + "weights_are_the_bounded_ratios",
    "algorithm.correction.band": CORRECTION + "weights_are_the_bounded_ratios",
    "algorithm.correction.normalize": CORRECTION + "normalised_weights_have_mean_1_over_what_is_kept",
    "algorithm.correction.reject": CORRECTION + "what_exceeds_a_bound_is_rejected",
    # ---- trained models
    "*.optimizer.warmup_steps": "engines/training/test_learning_rate.py::test_the_rate_rises_through_the_warm_up_and_falls_after_it",
    "*.optimizer.decay": "engines/training/test_learning_rate.py::test_cosine_decay",
    "*.optimizer.min_ratio": "engines/training/test_learning_rate.py::test_linear_decay",
    "*.zero_stage": "engines/training/test_trainer.py::test_the_optimizers_state_is_shared_out_from_stage_1_on",
    "*.gradient_checkpointing": "engines/training/test_updates.py::test_recomputed_activations_change_nothing",
    "actor.optimizer.learning_rate": f"{TOLD}the_actors_update",
    "actor.micro_batch_tokens": f"{TOLD}the_actors_update",
    "critic.optimizer.learning_rate": f"{TOLD}the_critics_update",
    "critic.micro_batch_tokens": f"{TOLD}the_critics_update",
    "critic.value_clip": f"{TOLD}the_critics_update",
    "critic.path": "engines/ranks/test_worker.py::test_values_are_the_trained_critics",
    "sft.optimizer.learning_rate": f"{TOLD}supervised_steps",
    "sft.micro_batch_tokens": f"{TOLD}supervised_steps",
    "sft.batch": f"{TOLD}supervised_steps",
    "sft.steps": "tasks/finetuning/test_blocks.py::test_blocks_cover_every_step_once",
    "sft.checkpoint_every": "tasks/finetuning/test_blocks.py::test_blocks_cover_every_step_once",
    "sft.max_tokens": "penstock/data/test_sft.py::test_over_long_rows_are_dropped_and_counted",
    "sft.offload_optimizer": "configs/test_schema.py::test_the_optimizer_rests_in_host_memory_only_where_deepspeed_can_move_it",
    "actor.offload_optimizer": "engines/training/test_trainer.py::test_states_that_rest_in_host_memory_train_alike",
    "critic.offload_optimizer": "engines/training/test_trainer.py::test_states_that_rest_in_host_memory_train_alike",
    "*.optimizer.betas": f"{TRAINER}losses_norms_clipping_and_rates_are_torchs_own_at_every_zero_stage",
    "*.optimizer.eps": f"{TRAINER}losses_norms_clipping_and_rates_are_torchs_own_at_every_zero_stage",
    "*.optimizer.weight_decay": f"{TRAINER}losses_norms_clipping_and_rates_are_torchs_own_at_every_zero_stage",
    "*.optimizer.max_grad_norm": f"{TRAINER}losses_norms_clipping_and_rates_are_torchs_own_at_every_zero_stage",
    "*.lora.rank": "engines/weights/test_lora.py::test_sizes_without_torch_are_the_models_own",
    "*.lora.alpha": "engines/weights/test_lora.py::test_what_is_written_is_the_same_model_merged_and_for_peft",
    "*.lora.targets": "engines/weights/test_lora.py::test_only_targets_get_adapters_and_a_score_head_stays_trained",
    # ---- the rest of a run
    "evaluate.every": "flows/test_train_flow.py::test_evaluations_have_intervals",
    "evaluate.prompts": f"{TOLD}an_evaluation",
    "evaluate.samples": f"{TOLD}an_evaluation",
    "evaluate.temperature": f"{TOLD}an_evaluation",
    "evaluate.evaluators": "tasks/iteration/test_evaluated.py::test_an_evaluator_that_fails_is_logged_and_counted",
    "checkpoint.every": "flows/test_train_flow.py::test_checkpoints_are_timed_and_sized_in_the_figures",
    "checkpoint.best": "penstock/state/test_manifest.py::test_the_best_checkpoint_is_kept_as_well",
    "checkpoint.keep": "flows/test_train_flow.py::test_the_run_folder_holds_all_that_was_made",
    "groups.<name>.gpus": "engines/groups/test_placement.py::test_groups_get_the_devices_and_roles_they_name",
    "groups.<name>.roles": "engines/groups/test_placement.py::test_groups_get_the_devices_and_roles_they_name",
    "groups.<name>.ranks": "engines/groups/test_placement.py::test_cpu_ranks_are_counted",
    "groups.<name>.pool": f"{PLACED}a_group_of_a_pool_has_its_gpus_on_each_of_its_machines",
    "groups.<name>.hosts": f"{PLACED}a_group_of_a_pool_has_its_gpus_on_each_of_its_machines",
    "hosts.address": f"{HOSTS}an_address_that_is_not_this_machine_s_is_named",
    "hosts.port": f"{HOSTS}a_training_has_its_hosts_and_lets_them_go",
    "hosts.interface": "hosts/test_pool.py::test_a_pool_gives_a_training_its_hosts",
    "hosts.join_timeout_s": f"{HOSTS}who_has_not_joined_in_time_is_told_and_the_others_are_let_go",
    "hosts.silence_s": "hosts/test_pool.py::test_a_pool_gives_a_training_its_hosts",
    "engine.start_timeout_s": "engines/groups/test_placement.py::test_without_groups_one_group_takes_all_there_is",
    "engine.command_timeout_s": "engines/groups/test_placement.py::test_without_groups_one_group_takes_all_there_is",
    "engine.heartbeat_timeout_s": "engines/groups/test_placement.py::test_without_groups_one_group_takes_all_there_is",
    "engine.restarts": "penstock/session/test_events.py::test_more_losses_than_allowed_end_the_run",
    "engine.restart_window_s": "penstock/session/test_events.py::test_more_losses_than_allowed_end_the_run",
    "record.tracker": "penstock/trackers/test_added.py::test_a_new_tracker_gets_a_run_and_its_resume_each_figure_once",
    "record.experiment": "flows/test_train_flow.py::test_mlflow_holds_the_run",
    "record.samples_every": "flows/test_train_flow.py::test_mlflow_holds_the_run",
    "record.samples": "flows/test_train_flow.py::test_mlflow_holds_the_run",
}

PAIRS_AND_LABELS = "penstock/data/test_preference.py::test_a_pair_is_two_adjacent_rows_that_end"

# Pairs for a policy or a reward model; the same trainer, and the same way from a row to a prompt.
PAIRS = {
    "*.optimizer.learning_rate": f"{TOLD}steps_on_preferences",
    "*.optimizer.warmup_steps": TRAIN["*.optimizer.warmup_steps"],
    "*.optimizer.decay": TRAIN["*.optimizer.decay"],
    "*.optimizer.min_ratio": TRAIN["*.optimizer.min_ratio"],
    "*.optimizer.betas": TRAIN["*.optimizer.betas"],
    "*.optimizer.eps": TRAIN["*.optimizer.eps"],
    "*.optimizer.weight_decay": TRAIN["*.optimizer.weight_decay"],
    "*.optimizer.max_grad_norm": TRAIN["*.optimizer.max_grad_norm"],
    "*.lora.rank": TRAIN["*.lora.rank"],
    "*.lora.alpha": TRAIN["*.lora.alpha"],
    "*.lora.targets": TRAIN["*.lora.targets"],
    "trainer.zero_stage": "engines/training/test_preference.py::test_an_update_on_pairs_is_the_plain_loop",
    "trainer.gradient_checkpointing": f"{TOLD}the_model_to_train",
    "trainer.offload_optimizer": "configs/test_preference.py::test_refusals",
    "trainer.micro_batch_tokens": f"{TOLD}steps_on_preferences",
    "trainer.batch": f"{TOLD}steps_on_preferences",
    "trainer.steps": "flows/test_preference_flow.py::test_a_policy_learns_what_is_preferred",
    "trainer.checkpoint_every": "flows/test_preference_flow.py::test_a_killed_training_goes_on_as_one_left_alone",
    "trainer.max_tokens": PAIRS_AND_LABELS,
    "devices.gpus": "configs/test_preference.py::test_devices_are_those_of_the_engines",
    "devices.ranks": "configs/test_preference.py::test_devices_are_those_of_the_engines",
    "devices.pool": f"{PLACED}the_ranks_of_an_offline_training_are_on_the_machines_of_a_pool",
    "devices.hosts": f"{PLACED}the_ranks_of_an_offline_training_are_on_the_machines_of_a_pool",
    "tracker": "penstock/trackers/test_added.py::test_training_on_preferences_is_recorded_where_tracker_says",
    "experiment": "flows/test_preference_flow.py::test_a_policy_learns_what_is_preferred",
    "data.train": "flows/test_preference_flow.py::test_a_mistake_in_the_data_ends_it_before_anything_starts",
    "data.heldout": "flows/test_preference_flow.py::test_a_policy_learns_what_is_preferred",
    "data.prompt": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "data.chosen": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "data.rejected": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "data.chat_arguments": "penstock/data/test_preference.py::test_arguments_of_the_chat_template_are_those_of_the_recipe",
    "data.chat": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "data.template": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "data.shuffle": f"{TOLD}steps_on_preferences",
}
PREFERENCE = {
    **PAIRS,
    "data.response": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "data.label": "penstock/data/test_preference.py::test_columns_and_prompts_are_those_that_the_recipe_names",
    "loss.name": f"{TOLD}steps_on_preferences",
    "loss.settings": "tasks/test_what_ranks_are_told.py::test_every_setting_reaches_its_preference_loss",
}
REWARD_MODEL = {
    **PAIRS,
    "data.margin": "penstock/data/test_preference.py::test_a_reward_model_sees_the_text_that_a_reward_shows_it",
}
SHARED_WITH_TRAIN = ("base", "name", "folder", "seed", "model.", "engine.", "hosts.")  # keys, and beginnings of keys

EFFECTS = {"train": TRAIN, "preference": PREFERENCE, "reward-model": REWARD_MODEL}
