"""Which slow tests `.ci/run` runs beside the default suite: of each slow module one that stands for
its kind.

A slow test of which the default suite runs other cases is represented by them. A module that has a
slow test of another kind names one here, which is quick and goes the whole way that the module is
about. `make test-slow` runs all. Of the extras that are installed from the wheel, CI tries those of
a device, of a server and of an exporter.
"""

import sys
from collections.abc import Iterable

__all__ = [
    "INSTALLED",
    "SLOW",
    "function_of",
    "module_of",
    "modules_without_quick_cases",
    "representatives",
]

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

SLOW = {
    "tests/broker_server/test_backup.py": "test_rounds_that_are_closed_once_more_count_twice[options0-3]",
    "tests/broker_server/test_encoded_updates.py": "test_good_and_bad_encodings",
    "tests/broker_server/test_faults.py": "test_a_database_that_is_locked_for_a_while_costs_time_only",
    "tests/broker_server/test_floods.py": "test_a_flood_delays_a_run_request_by_a_second_at_most",
    "tests/broker_server/test_foreign_graphs.py": "test_a_server_ends_in_time_with_a_graph_at_work[the last version]",
    "tests/broker_server/test_launch.py": "test_an_embedded_broker_that_dies_is_started_again",
    "tests/broker_server/test_receivers.py": "test_receivers_that_are_killed_at_any_moment_lose_nothing[0]",
    "tests/broker_server/test_refused_runs.py": "test_heads_of_tiers_own_need_a_method_that_keeps_them",
    "tests/broker_server/test_secure_sums.py": "test_a_killed_server_makes_its_sums_again",
    "tests/broker_server/test_signed_backups.py": "test_a_bomb_is_refused_in_little_memory",
    "tests/broker_server/test_steering.py": "test_commands_steer_a_run_by_the_page_of_its_server",
    "tests/device_runtime/test_agent.py": "test_a_broker_that_dies_in_mid_task[mosquitto]",
    "tests/device_runtime/test_backends.py": "test_both_flavours_agree[lenet5]",
    "tests/device_runtime/test_changing_contract.py": "test_columns_in_another_order_are_put_into_that"
    "_of_the_fleet",
    "tests/device_runtime/test_changing_data.py": "test_files_that_are_gone_are_refused_by_name_until_they_are_back[npy]",
    "tests/device_runtime/test_conditions.py": "test_a_board_pauses_gives_its_task_back_and_goes_on",
    "tests/device_runtime/test_doctor.py": "test_access_rules_that_do_not_fit_are_named_with_the_topic[blobs]",
    "tests/device_runtime/test_early_exits.py": "test_held_out_samples_measure_each_bound[mean]",
    "tests/device_runtime/test_encoded_updates.py": "test_what_was_lost_survives_a_kill",
    "tests/device_runtime/test_hindrances.py": "test_a_certificate_that_is_not_valid_yet",
    "tests/device_runtime/test_inputs.py": "test_a_set_lists_its_noise",
    "tests/device_runtime/test_killed.py": "test_the_status_names_the_states_that_last",
    "tests/device_runtime/test_killed_with_state.py": "test_a_board_goes_on_with_all_that_it_keeps[parts]",
    "tests/device_runtime/test_made_up_weights.py": "test_other_last_bits_of_the_samples_change_few_digits_of_a_deep_network",
    "tests/device_runtime/test_memory.py": "test_an_agent_that_the_kernel_kills_comes_back_smaller",
    "tests/device_runtime/test_predicting.py": "test_the_personal_model",
    "tests/device_runtime/test_refusing_broker.py": "test_an_hour_of_a_board_whose_broker_refuses_its"
    "_packets_costs_little[quota-exceeded]",
    "tests/device_runtime/test_torch_free.py": "test_a_board_trains_an_exported_set[conv]",
    "tests/documents/test_typed.py": "test_exports[shoal export --arch mlp --widths 1 --formats "
    "onnx --out sets]",
    "tests/fleet/test_base.py": "test_boards_of_unequal_rank_share_a_base_that_each_fetches_once",
    "tests/fleet/test_chaos.py": "test_rounds_close_whatever_the_network_does",
    "tests/fleet/test_choosing_fleet.py": "test_boards_choose_what_their_simulation_chooses[1]",
    "tests/fleet/test_contract.py": "test_boards_with_disjoint_classes_learn_as_with_one_numbering",
    "tests/fleet/test_encodings.py": "test_a_fleet_ends_where_its_simulation_does[int8-heterofl-0.3-fp32]",
    "tests/fleet/test_entities.py": "test_alone_every_device_keeps_its_labels_too",
    "tests/fleet/test_identity.py": "test_whatever_is_said_in_anothers_place_is_refused_and_counted[insider]",
    "tests/fleet/test_inclusive.py": "test_baselines_run_and_learn[exclusive-2-w1.00-d3-digits]",
    "tests/fleet/test_methods.py": "test_methods_of_equal_devices_learn[fedavg]",
    "tests/fleet/test_minilm.py": "test_two_depths_of_a_pretrained_encoder_are_merged[blocks]",
    "tests/fleet/test_memory_plans.py": (
        "test_a_board_whose_step_was_killed_trains_by_a_plan_with_the_same_bits"
    ),
    "tests/fleet/test_mutual.py": "test_an_adaptor_stays_on_its_device",
    "tests/fleet/test_mutual_shapes.py": "test_boards_of_ten_and_of_a_hundred_classes_share_a_trunk",
    "tests/fleet/test_predictions.py": "test_a_stranger_asks_nothing",
    "tests/fleet/test_private_wire.py": "test_no_private_value_passes_the_broker[int8]",
    "tests/fleet/test_rollout.py": "test_a_release_whose_onnxruntime_does_not_train_is_never_tried",
    "tests/fleet/test_rollout_bundle.py": "test_a_bundle_is_replaced_over_the_air_and_a_broken_one_takes_itself_back",
    "tests/fleet/test_rollout_plans.py": "test_a_board_with_little_memory_takes_the_plan_of_a_new_set",
    "tests/fleet/test_rollout_sets.py": "test_sets_of_another_model_are_not_begun",
    "tests/fleet/test_rounds.py": "test_a_device_killed_in_mid_round_comes_back_and_finishes",
    "tests/fleet/test_secure_sums.py": "test_a_fleet_ends_where_its_simulation_does",
    "tests/fleet/test_shut_out.py": "test_a_board_whose_enrolment_counts_no_more_waits_for_a_new_one[revoked]",
    "tests/fleet/test_silent.py": "test_a_halted_board_is_waited_for_as_one_that_is_gone",
    "tests/fleet/test_strangers.py": "test_a_board_that_is_renewed_after_its_end_says_that_it_is_there",
    "tests/gallery/test_gallery.py": "test_half_of_it_trains_in_a_graph[adaptive_pools]",
    "tests/gallery/test_remedies.py": "test_what_is_advised_trains_in_a_graph[alibi]",
    "tests/packaging/test_extras.py": "test_pip_refuses_both_runtimes[device-server-training]",
    "tests/packaging/test_wheel.py": "test_the_wheel_has_every_package_file_and_no_test",
    "tests/reproduction/test_conformance.py": "test_the_command_runs_as_a_module",
    "tests/reproduction/test_running.py": "test_every_table_runs_at_the_scale_smoke[heterofl-1]",
    "tests/reproduction/test_sharing.py": "test_rounds_that_end_by_time_are_not_those_of_another_clock",
    "tests/shoal/flash/test_bundle.py": f"test_it_installs_without_a_network_and_trains[{PYTHON}]",
    "tests/shoal/flash/test_image.py": "test_the_same_inputs_give_the_same_card",
    "tests/shoal/test_api.py": "test_the_examples_run",
    "tests/shoal/test_commands.py": "test_export_explains_how_it_cuts",
    "tests/shoal/test_export_mutual.py": "test_it_prints_both_models_and_publishes_one_set",
    "tests/shoal/test_first_day.py": "test_three_commands_lead_from_files_to_the_original_class[table]",
    "tests/shoal/test_fleet_export.py": "test_boards_train_and_end_with_the_run",
    "tests/shoal/test_lazy.py": "test_version_costs_half_a_second_of_cpu_at_most",
    "tests/shoal/test_loading.py": "test_lines_of_each_format_end_with_the_labels_that_the_run_had",
    "tests/shoal/test_shadowing.py": "test_the_embedded_broker_starts_there",
    "tests/shoal/test_templates.py": "test_a_template_is_exported_and_simulated[tabular]",
    "tests/shoal/test_tracking.py": "test_nobody_who_answers_is_said",
    "tests/shoal/view/test_api.py": "test_a_server_shows_its_own_store",
    "tests/shoal/view/test_metrics.py": "test_compose_reads_its_file",
    "tests/shoal/view/test_page.py": "test_it_says_who_learns_who_does_not_and_what_to_do",
    "tests/simulation/test_asynchronous.py": "test_a_slow_device_answers_after_its_own_time",
    "tests/simulation/test_attacks.py": "test_the_liars_are_named_and_no_longer_asked",
    "tests/simulation/test_drop_outs.py": "test_a_deadline_is_one_of_emulated_time",
    "tests/simulation/test_dynamics.py": "test_every_method_meets_the_same_conditions",
    "tests/simulation/test_exits.py": "test_a_fleet_of_two_depths_has_the_bits_of_its_simulation",
    "tests/simulation/test_feddyn.py": "test_a_fleet_ends_where_its_simulation_does",
    "tests/simulation/test_own_accuracy.py": "test_the_newest_accuracy_of_each_device_counts",
    "tests/simulation/test_own_data.py": "test_devices_are_judged_where_the_loss_ignores_a_label",
    "tests/simulation/test_own_strategy.py": "test_the_page_works_as_it_stands",
    "tests/simulation/test_privacy.py": "test_noise_follows_from_the_seed[central]",
    "tests/simulation/test_private.py": "test_a_fleet_keeps_what_its_simulation_keeps[heterofl]",
    "tests/simulation/test_ray.py": "test_ray_here_computes_what_the_local_engine_computes",
    "tests/simulation/test_recipes.py": "test_both_backends_do_the_same_arithmetic[adamw]",
    "tests/simulation/test_runner.py": "test_a_killed_simulation_goes_on_to_the_same_bits[update-received-2-1]",
    "tests/simulation/test_several.py": "test_arrays_in_another_order_are_refused",
    "tests/simulation/test_shares.py": "test_a_fleet_of_shares_ends_where_its_simulation_does"
    "[w1.00-d1-t0.50]",
    "tests/simulation/test_torch_backend.py": "test_the_rest_of_the_zoo_ends_where_boards_end[lenet5]",
    "tests/test_fuzz.py": "test_a_process_in_which_a_reading_failed_goes_on",
    "tests/test_howto.py": "test_mosquitto_lets_an_enrolled_board_in",
    "tests/test_notebooks.py": "test_slicing_and_merging",
    "tests/test_tutorial.py": "test_the_tutorial_works_as_written",
    "tests/test_unchanged.py": "test_final_weights_are_the_recorded_ones[one_round]",
    "tests/trainer_export/test_artifact_set.py": "test_every_file_is_an_object_of_its_digest",
    "tests/trainer_export/test_base.py": "test_all_tiers_name_one_file_and_no_graph_returns_it",
    "tests/trainer_export/test_base_memory.py": "test_a_wide_decoder_trains_with_its_base_in_memory_and_on_disk_once",
    "tests/trainer_export/test_batch_uses.py": "test_tiers_of_the_gallery_are_what_a_symbol_gives[group_norm_whole]",
    "tests/trainer_export/test_build.py": "test_tiers_in_processes_of_their_own_are_the_same",
    "tests/trainer_export/test_check.py": "test_not_a_number_is_a_deviation",
    "tests/trainer_export/test_errors.py": "test_a_refusal_and_what_it_advises[lgamma]",
    "tests/trainer_export/test_executorch.py": "test_every_kind_of_architecture_agrees_with_pytorch[mlp]",
    "tests/trainer_export/test_idle_heads.py": "test_an_output_that_no_loss_depends_on_is_refused",
    "tests/trainer_export/test_memory.py": "test_rewriting_twice_changes_nothing_more",
    "tests/trainer_export/test_mutual_set.py": "test_a_device_trains_both_models_as_pytorch_does",
    "tests/trainer_export/test_optimizers.py": "test_parameters_without_a_slope_do_not_fail_the_comparison[recipe0]",
    "tests/trainer_export/test_own_functions.py": "test_the_list_of_a_samples_labels_ends_where_pytorch_ends_it",
    "tests/trainer_export/test_recurrent.py": "test_every_graph_of_a_recurrent_model",
    "tests/trainer_export/test_registry.py": "test_every_graph_agrees_with_pytorch[mlp]",
    "tests/trainer_export/test_shares.py": "test_a_window_below_the_top_trains_its_blocks",
    "tests/trainer_export/test_user_models.py": "test_any_geometry_of_a_convolution",
    "tests/trainer_export/test_zoo_graphs.py": "test_graphs_hold_standard_operators_only",
}
"""A test for each module, in which it alone is slow and marked `representative`."""

INSTALLED = (
    "tests/packaging/test_installed.py::test_device_and_server",
    "tests/packaging/test_installed.py::test_export[export]",
)


def module_of(test: str) -> str:
    """The file of a test."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """A test without its case."""
    return test.partition("[")[0]


def representatives() -> set[str]:
    """All that CI runs beside the default suite."""
    return {f"{module}::{name}" for module, name in SLOW.items()} | set(INSTALLED)


def modules_without_quick_cases(slow: Iterable[str], quick: Iterable[str]) -> set[str]:
    """The modules that need a representative.

    Args:
        slow: tests of the slow suite.
        quick: tests of the default suite.
    """
    represented = {function_of(test) for test in quick}
    return {module_of(test) for test in slow if function_of(test) not in represented}
