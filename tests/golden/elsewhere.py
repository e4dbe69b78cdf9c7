"""Places that no case of the golden table reaches, because they need a longer run, other machines or other versions."""

from __future__ import annotations

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "accelerator/test_order.py::test_a_late_change_through_data_is_refused": ("WeightStash.refuse_changes",),
    "accelerator/test_borders.py::test_a_function_that_changes_what_it_is_given": ("_Together.__torch_function__",),
    "accelerator/test_chance.py::test_other_values_than_by_rounding_are_refused": ("capture#2",),
    "accelerator/test_chance.py::test_they_are_noticed_in_a_pipeline": (
        "TrainingWatch._run#2",
        "refuse_noticed",
        "refuse_seeded",
    ),
    "accelerator/test_larger_than_a_device.py::test_weights_are_stashed_where_a_prediction_lacks_room": (
        "Planner._within_memory",
    ),
    "capture/test_export.py::test_the_remedy_for_a_size_that_is_computed_from_data": ("_refusal#1",),
    "capture/test_export.py::test_what_has_no_graph": (
        "_left_alone.check#2",
        "_refusal#2",
        "_refuse_cumulative_averages",
        "_traced#1",
        "_traced#2",
        "replaces_buffer",
    ),
    "capture/test_fingerprint.py::test_other_layers_are_refused": ("Fingerprint.follow",),
    "capture/test_leaves.py::test_a_loss_that_is_a_leaf": ("refuse_leaves#2",),
    "capture/test_piece_search.py::test_a_module_that_is_called_twice_in_another_runs_as_user_code": (
        "PieceSearch._take#2",
    ),
    "capture/test_piece_search.py::test_when_the_time_is_over": ("PieceSearch._take#1",),
    "capture/test_sequentials.py::test_a_refused_kind_of_sequential_is_not_tried_again": ("PieceSearch._capture",),
    "capture/test_sequentials.py::test_children_as_they_are_and_a_line_that_says_why": (
        "TrainingWatch._refuse_without_graph#1",
        "write_assigned_buffers#1",
    ),
    "capture/test_watch.py::test_values_that_are_not_tensors_pass_through_layers": ("capture#1",),
    "capture/test_watch_refusals.py::test_a_module_that_computes_with_the_parameter_of_another_one": (
        "refuse_foreign_leaf",
    ),
    "capture/test_watch_refusals.py::test_a_piece_that_is_given_strange_objects": ("refuse_opaque",),
    "cli/test_errors.py::test_a_users_file_that_cannot_be_read_is_one_sentence": ("_check_top#1",),
    "cli/test_errors.py::test_servers_at_a_wrong_address_are_one_line": ("JoinHandshake._explaining_waits",),
    "cli/test_measured_links.py::test_a_server_that_does_not_answer": ("_links_to_servers",),
    "evaluation/test_attention.py::test_a_decoder_asks_for_no_inference_mode": (
        "EvaluationWatch._handed_on#2",
        "_other_values",
    ),
    "evaluation/test_left_to_the_module.py::test_a_warning_says_why": (
        "EvaluationWatch._try#2",
        "EvaluationWatch._try#3",
        "EvaluationWatch._try#4",
    ),
    "evaluation/test_left_to_the_module.py::test_steps_of_any_kind": ("EvaluationWatch._try#1",),
    "evaluation/test_pipelining.py::test_weights_changed_in_the_middle_are_refused": ("UnchangedWeights.continues",),
    "evaluation/test_taken_apart_evaluation.py::test_what_a_module_changes_is_changed_once": (
        "EvaluationWatch._try#5",
    ),
    "exact/test_between.py::test_contents_that_change_while_minibatches_are_in_flight_are_refused": (
        "PieceCalls.settled",
    ),
    "accelerator/test_order.py::test_changes_of_buffers_by_callbacks": ("Buffers.refuse_changes",),
    "capture/test_captured.py::test_sizes_that_cannot_vary_have_graphs_of_their_own": ("Captured.value#1",),
    "exact/test_captured_changes.py::test_inputs_of_too_many_kinds": ("Captured.value#2",),
    "exact/test_captured_changes.py::test_what_no_graph_can_do": (
        "Observation.refuse_custom_function#2",
        "_left_alone.check#1",
        "_left_alone.check#3",
    ),
    "exact/test_data.py::test_a_step_that_changes_its_batch_in_place": ("LookAhead._refuse_changed_memory",),
    "exact/test_default_settings.py::test_a_cache_that_training_step_gives_is_named": ("graph_of#1",),
    "exact/test_default_settings.py::test_numbers_that_change": ("_traced#3",),
    "exact/test_direct.py::test_buffers_that_training_step_uses": (
        "ParameterView.__torch_function__",
        "ParameterView._refuse#3",
    ),
    "exact/test_direct.py::test_gradients_that_training_step_uses": ("ParameterView._refuse#2",),
    "exact/test_direct.py::test_layers_within_a_function_of_torch_func": ("Observation.check#1", "ParameterView._use"),
    "exact/test_direct.py::test_memory_of_weights_that_training_step_uses": ("ParameterView._find_behind",),
    "exact/test_direct.py::test_weights_that_training_step_changes": ("UsedParameter.check",),
    "exact/test_direct.py::test_what_torch_func_is_given": ("ParameterView._find", "_within_torch_func"),
    "exact/test_frozen_values.py::test_a_change_of_gradients_alone_is_refused": ("compare#2",),
    "exact/test_functions_of_torch.py::test_a_buffer_that_a_later_call_changes": ("WatchedCall.own_buffers",),
    "exact/test_functions_of_torch.py::test_torch_forgets_what_it_could_not_compile": ("_apart.run",),
    "exact/test_growing_caches.py::test_a_cache_of_the_last_length_is_refused": ("compare#1",),
    "exact/test_inside_blocks.py::test_a_callback_that_no_graph_follows": ("TrainingWatch._refuse_without_graph#2",),
    "exact/test_live_changes.py::test_a_checkpoint_around_a_batchnorm_is_refused": ("SegmentRunner.backward",),
    "exact/test_recompute.py::test_an_input_that_user_code_changes_in_place_is_refused": ("SegmentRunner._again",),
    "exact/test_side_effects.py::test_a_joint_hook_around_a_call_is_refused": ("ParameterView._refuse_joint_hook",),
    "exact/test_side_effects.py::test_an_array_in_the_memory_of_a_buffer_or_weight": ("Attributes.reads",),
    "exact/test_side_effects.py::test_an_evaluation_that_writes_a_buffer_is_told_of_it": ("Captured._own#1",),
    "exact/test_side_effects.py::test_an_argument_that_forward_fills": ("refusing_changes",),
    "exact/test_side_effects.py::test_other_gradients_are_found_whatever_makes_them": ("refuse_other_gradients",),
    "exact/test_side_effects.py::test_side_effects_are_those_of_a_plain_run": ("Captured._capture#2",),
    "exact/test_sums.py::test_a_change_in_place_by_way_of_another_tensor_is_refused": ("_StandIn.get",),
    "hosts/test_faults.py::test_a_host_that_ends_before_it_is_set_up": ("RemoteStage._host_lost",),
    "hosts/test_other_machines.py::test_a_layer_without_a_graph_has_to_be_planned_for_the_last_node": (
        "StagesApart.make",
    ),
    "parity/test_checkpoint_saving.py::test_training_step_saves_no_checkpoint_ahead_of_the_loop": (
        "HetPipeStrategy.save_checkpoint",
    ),
    "pipeline/test_creation.py::test_what_cannot_be_made_of_converted_numbers_is_refused": (
        "_Creating._promoted#2",
        "_Creating._refusal",
    ),
    "pipeline/test_engine_failures.py::test_a_layer_that_only_later_changes_its_input_is_refused": (
        "SegmentRunner._compute#2",
    ),
    "pipeline/test_engine_failures.py::test_a_stuck_layer_is_named": ("Watchdog.wait",),
    "pipeline/test_left_out.py::test_its_use_names_it": (
        "LeftOut.__bool__",
        "LeftOut.__call__",
        "LeftOut.__getitem__",
        "LeftOut.__iter__",
        "LeftOut.__len__",
    ),
    "placement/test_plans.py::test_a_plan_for_another_model": ("Planner._follow#1",),
    "placement/test_plans.py::test_a_plan_for_more_minibatches_of_a_step_has_room_for_fewer_copies": (
        "Planner._check_copies",
    ),
    "placement/test_plans.py::test_a_plan_that_takes_more_memory_than_is_declared": ("DevicePlacement.planned",),
    "placement/test_plans.py::test_one_in_flight_takes_what_the_spread_run_would_that_is_emulated": (
        "Planner.__call__",
        "Planner._follow#2",
        "Planner._search",
        "Planner._unfit",
    ),
    "placement/test_plans.py::test_stages_that_share_a_device_and_do_not_fit": ("Planner._shared",),
    "run/test_intervals.py::test_within_a_wave_nobody_can_be_waited_for": ("WavesAndCuts._on_save#2",),
    "run/test_metric_replay.py::test_a_metric_from_elsewhere_cannot_be_logged_unnoticed": ("Replay._on_log",),
    "run/test_metric_replay.py::test_reading_a_metric_that_would_synchronise_is_refused": (
        "ShadowMetric._refuse_synchronisation",
    ),
    "run/test_module_attributes.py::test_a_read_of_what_the_last_step_sets_later_is_refused": (
        "Attributes._check_readers",
        "Attributes._fail",
        "Attributes._reads",
        "Attributes._refuse",
    ),
    "run/test_module_attributes.py::test_a_tensor_that_a_step_keeps_over_a_call_of_a_module": (
        "Attributes._end_copies#1",
    ),
    "run/test_refusals.py::test_a_gradient_through_a_piece": ("_PieceBoundary.backward",),
    "run/test_replay.py::test_a_value_read_ahead_is_refused_if_a_callback_then_changes_the_metric": ("Replay._make",),
    "run/test_shared_values.py::test_a_step_that_changes_what_lies_deep_is_refused": (
        "Attributes._end_copies#2",
        "SharedValues.leave",
    ),
    "run/test_ways_out.py::test_ways_out_are_named_and_train": (
        "Captured._capture#1",
        "Captured._other_layers",
        "Captured._own#2",
    ),
    "strategy/test_empty_init.py::test_writes_of_no_values_to_tensors_with_memory_are_refused": (
        "_Construction.__torch_dispatch__",
    ),
    "strategy/test_meta_weights.py::test_what_an_override_loads_counts_and_what_it_leaves_out_is_refused": ("_refuse",),
    "strategy/test_profiling_strategy.py::test_without_a_minibatch": ("profile#2",),
    "strategy/test_returned_state.py::test_nothing_of_it_is_unpickled_and_what_would_be_is_named": (
        "_loaded_from_others",
    ),
    "strategy/test_saved_states.py::test_a_state_that_cannot_be_read_is_refused": ("_unpacked",),
    "test_registration.py::test_a_torchvision_of_another_build_is_named": ("report",),
    "workers/test_coming_back.py::test_it_is_answered_from_the_record_until_it_has_a_seat": ("Returning.answer",),
    "workers/test_coming_back.py::test_nobody_comes_back_to_a_fit_that_is_over": ("Returning._recalled",),
    "workers/test_coming_back.py::test_one_that_asks_for_a_seat_too_late_may_be_started_again": ("Group._enter_again",),
    "workers/test_coming_back.py::test_one_that_comes_to_a_later_cut_than_that_of_its_state_has_no_seat": (
        "Group._agree_on_seats",
    ),
    "workers/test_coming_back.py::test_settings_other_than_the_others_are_named": (
        "Returning.check#1",
        "Returning.check#2",
    ),
    "workers/test_coming_back.py::test_the_seat_of_one_that_lives_is_not_taken": ("JoinHandshake.come_to",),
    "workers/test_group.py::test_a_lease_that_is_not_the_servers_is_refused": ("JoinHandshake.check_lease",),
    "workers/test_group.py::test_launches_share_no_server_that_holds_weights": ("JoinHandshake.join",),
    "wsp/test_group.py::test_who_shows_the_wrong_things_is_told_in_one_sentence": ("JoinHandshake._join_with",),
    "private/test_torch_modules.py::test_custom_functions_whose_modes_are_not_told_are_refused": ("_refuse_unheard",),
}
"""Places by the test that reaches them, most of which match the sentence."""

NOWHERE: dict[str, str] = {
    "Captured._decided": "a graph whose decisions differ each time that it is traced",
    "EvaluationWatch._handed_on#1": "a reason that is told in a warning, of a module that opaque output is cut off",
    "EvaluationWatch._handed_on#3": "a reason that is told in a warning",
    "EvaluationWatch._try#6": "a reason that is told in a warning",
    "PieceSearch._take#3": "a reason that is told in a warning",
    "RemoteStage.copy_layers": "layers that change between a fit and the next one at a host",
    "_Creating._promoted#1": "a function of torch that refuses the numbers which it was given, converted",
    "write_assigned_buffers#2": "a buffer's new value that requires a gradient, where torch.export writes it",
}
"""Places that no test reaches, and what would."""
