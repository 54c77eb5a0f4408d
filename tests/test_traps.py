"""Which test holds which trap: mistakes that real gateways, batchers and load generators made, and
where each is tried here.

The projects named are where the mistake was seen (their tracker's number, where it has one).
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from kendall.policies import POLICIES
from tests.policies.decisions import ROWS

HERE = Path(__file__).resolve().parent
TRAPS: dict[str, tuple[str, ...]] = {
    # between the connection and the queue
    "a task that is cancelled before its first step never runs its `finally`": (
        "server/test_clients_who_leave.py::test_trap_1_a_call_whose_task_is_cancelled_at_any_step_leaves_nothing_behind",
        "server/test_clients_who_leave.py::test_trap_1_the_table_is_emptied_even_where_no_caller_ever_runs_again",
    ),
    (
        "on disconnect a plain handler is not cancelled, a streaming one is (production-stack "
        "#634, LiteLLM #37140)"
    ): (
        "server/test_clients_who_leave.py::test_trap_2_a_connection_that_closes_frees_queue_and_engine_streamed_or_not",
        "server/test_clients_who_leave.py::test_trap_2_a_client_that_resets_in_the_middle_of_its_body_never_arrived",
        "server/test_client_connection.py::test_a_lost_connection_takes_its_call_out_of_the_engine",
        "server/test_client_connection.py::test_a_client_that_leaves_the_queue_gives_its_place_away",
        "server/test_real_gateway.py::test_a_client_that_leaves_frees_the_engine",
    ),
    "behind a middleware the disconnect is not seen (vLLM's recipe)": (
        "server/test_security.py::test_a_client_behind_the_cors_layer_can_still_leave",
    ),
    "a caller leaves at the very instant its batch ends, and settling its future ends the loop": (
        "server/test_clients_who_leave.py::test_trap_3_a_caller_who_leaves_at_the_instant_of_any_token_or_of_the_end_breaks_nothing",
    ),
    "bodies are parsed before they are refused (SMG #2247)": (
        "server/admission/test_admission.py::test_a_full_queue_refuses_before_it_reads_and_says_when_there_is_room",
        "server/admission/test_early_rejection.py::test_the_refusal_is_whole_before_the_body_is_read_and_the_body_is_read_before_it_ends",
        "server/test_security.py::test_the_hot_routes_refuse_before_the_body_is_read",
    ),
    "overflow leaves clients without an answer (SGLang #33858)": (
        "server/admission/test_admission.py::test_a_full_queue_refuses_before_it_reads_and_says_when_there_is_room",
        "server/admission/test_admission.py::test_every_call_has_one_outcome_and_one_record",
        "server/admission/test_twenty_fold.py::test_the_short_form_of_it",
        "server/admission/test_twenty_fold.py::test_a_minute_of_it",
    ),
    "error bodies and labels grow with what clients send": (
        "server/test_security.py::test_an_error_repeats_at_most_80_characters_of_what_was_sent",
        "server/test_security.py::test_no_error_text_is_longer_than_its_bound_nor_slow_to_make",
        "server/test_api_surface.py::test_an_error_stays_small_whatever_came_in",
        "server/test_security.py::test_every_label_has_a_bound_whatever_clients_and_operators_send",
        "server/test_cost.py::test_policies_beyond_the_bound_share_one_label",
    ),
    # what an attack from outside found
    (
        "trailers and chunk extensions fill the memory, and a trailer replaces a header (uvicorn "
        "with httptools)"
    ): (
        "server/test_request_framing.py::test_trap_a_trailer_is_no_header",
        "server/test_request_framing.py::test_trap_trailers_and_chunk_extensions_are_bounded_as_a_head_is",
    ),
    "a request that was refused is read to its end": (
        "server/test_request_framing.py::test_trap_a_request_that_is_answered_is_not_read_to_its_end",
        "server/test_request_framing.py::test_the_body_of_an_answered_request_is_not_kept",
    ),
    "memory of a burst is never given back": (
        "server/test_memory_given_back.py::test_memory_is_given_back_once_after_it_has_grown_and_only_at_a_quiet_moment",
        "server/test_memory_given_back.py::test_trap_the_memory_of_every_attack_comes_back",
        "server/test_memory_given_back.py::test_callers_that_left_keep_no_objects",
        "server/test_memory_given_back.py::test_trap_8000_callers_that_left_at_once_are_not_held_three_times",
    ),
    "two servers read two different hosts in one request (RFC 9112, 3.2)": (
        "server/test_request_framing.py::test_trap_a_request_names_its_host_once",
    ),
    "behind a proxy on the same machine everybody is the operator": (
        "server/test_admin_key.py::test_trap_behind_nginx_on_this_machine_nobody_drains_calibrates_or_becomes_admin",
        "server/test_security.py::test_trap_draining_and_calibrating_need_the_admin_key_always",
    ),
    "any page in a browser makes a local server work, or holds it": (
        "server/test_security.py::test_trap_no_page_of_another_origin_calls_admin_with_or_without_a_key",
        "server/test_security.py::test_trap_allowed_origins_open_chat_and_not_admin",
        "server/test_security.py::test_trap_without_keys_a_page_cannot_send_work_without_asking",
        "server/test_security.py::test_trap_without_keys_a_page_cannot_call_by_a_name_of_its_own",
        "server/test_questions.py::test_trap_a_question_whose_askers_have_left_is_not_asked",
    ),
    "5 KB ask for 131,072 sequences, and everybody waits while they are built": (
        "server/admission/test_one_call.py::test_a_small_body_that_asks_for_131072_sequences_is_refused_before_anything_is_built",
        "server/test_real_gateway.py::test_what_one_client_sizes_holds_up_nobody_else",
        "server/test_real_chaos.py::test_a_thousand_calls_beside_a_fault_have_one_outcome_each",
    ),
    "one form that takes long to compile holds up everybody, and its retries end the gateway": (
        "server/test_real_forms.py::test_a_heavy_form_is_refused_once_and_harms_no_other_call",
        "server/test_real_forms.py::test_a_client_that_leaves_its_heavy_form_stops_the_compilation",
        "server/test_forms.py::test_a_slow_form_is_given_up_and_refused_at_once_when_it_comes_again",
        "server/test_forms.py::test_a_form_that_is_too_large_is_refused_before_anybody_compiles_it",
    ),
    (
        "a request's own fault ends as 503, which clients send again and balancers eject a server "
        "for"
    ): (
        "server/test_real_gateway.py::test_what_the_engine_cannot_do_is_said_before_the_request_queues",
        "server/test_forms.py::test_a_bad_form_is_the_clients_fault_and_the_next_one_is_compiled",
        "server/test_status_table.py::test_status_headers_and_body_are_as_the_table_says",
    ),
    "a prompt beyond the context has another code for each engine, and clients switch on it": (
        "server/test_real_gateway.py::test_statuses_are_as_the_table_says",
        "server/test_status_table.py::test_status_headers_and_body_are_as_the_table_says",
    ),
    "what a client sizes (bad words, messages) is tokenised or parsed on the event loop": (
        "server/admission/test_one_call.py::test_what_a_client_sizes_is_bounded_before_the_engine_hears_of_it",
        "server/test_real_gateway.py::test_what_one_client_sizes_holds_up_nobody_else",
        "server/test_bodies.py::test_a_body_of_too_many_values_reaches_no_parser",
        "server/test_bodies.py::test_a_large_body_is_parsed_in_a_thread",
    ),
    "viewers of the live page use up the connections": (
        "page/test_feed.py::test_viewers_from_one_address_are_bounded_and_others_are_not_shut_out",
        "page/test_feed.py::test_viewers_are_bounded_in_all_and_no_address_is_kept",
    ),
    "ids of answers are a counter, which each replica and each restart repeats": (
        "server/test_api_surface.py::test_ids_of_answers_are_random_and_tell_no_count",
    ),
    "a redirect leads to the host that the client named": (
        "server/test_api_surface.py::test_a_path_with_a_slash_too_many_is_not_redirected_to_the_clients_host",
    ),
    (
        "errors tell internals: a path, an address in memory, an error of Python's, a kind of the "
        "schemas"
    ): (
        "server/test_security.py::test_an_error_tells_no_path_and_no_address",
        "server/test_security.py::test_an_engine_that_refuses_with_a_path_in_its_words_does_not_tell_it",
        "server/test_vllm_engine.py::test_a_fault_in_the_middle_of_the_template_tells_no_internals",
        "server/test_api_surface.py::test_the_place_of_an_error_names_no_kind_of_the_schemas",
    ),
    "a key that leaked is good until a restart": (
        "server/test_reloading.py::test_keys_are_revoked_and_added_at_once",
        "server/test_reloading.py::test_a_gateway_takes_up_keys_and_certificate_and_survives_what_is_wrong",
    ),
    "every user of the machine reads the file of keys, and nobody is told": (
        "server/test_security.py::test_key_files_that_others_can_read_are_warned_of",
        "server/test_reloading.py::test_key_files_that_everybody_reads_are_named_again",
    ),
    "a container has rights that nobody needs": (
        "test_containers.py::test_compose_leaves_no_right_that_nobody_needs",
        "test_containers.py::test_a_target_runs_without_rights_has_a_check_and_its_own_flavour",
        "test_kubernetes.py::test_the_root_file_system_is_read_only_and_what_is_written_has_a_volume",
        "test_kubernetes.py::test_the_network_policy_means_this_pod_and_its_port",
    ),
    "refused calls fill the log": (
        "server/test_audit_trail.py::test_trap_denials_do_not_fill_the_log",
    ),
    # the queue and the policy
    (
        "a batch's timeout means four things in four systems; here: since the oldest waiting "
        "request arrived"
    ): (
        "policies/test_decide.py::test_the_deadline_of_fixed_is_that_of_the_oldest_not_of_the_newest",
        "server/test_batching_traps.py::test_a_full_batch_leaves_at_once_and_a_partial_one_when_its_oldest_has_waited",
    ),
    (
        "a full batch is held for the longest wait (KServe); the timer runs from the loop's turn "
        "(LitServe)"
    ): (
        "server/test_batching_traps.py::test_a_full_batch_leaves_at_once_and_a_partial_one_when_its_oldest_has_waited",
    ),
    "no comparison of gateway and simulator sees a wrong policy: they share it": (
        "policies/test_decide.py::test_decision",
        "test_traps.py::test_every_policy_has_hand_written_decisions_over_several_waiting_requests",
    ),
    "a cancelled request keeps its place, or wedges its batch (Ray #50046, #50054)": (
        "server/test_batching_traps.py::test_members_that_leave_before_the_dispatch_neither_fill_nor_wedge_a_batch",
        "server/test_http.py::test_a_client_that_leaves_frees_queue_and_engine",
        "server/test_http.py::test_a_cancelled_member_of_a_padded_batch_leaves_the_others_alone",
    ),
    "an exception in sizing a batch ends the loop (Ray #66140)": (
        "server/test_faults.py::test_a_policy_that_raises_leaves_the_queue_as_it_is_and_is_asked_again",
        "server/test_faults.py::test_an_observer_that_raises_harms_nobody",
        "server/test_faults.py::test_a_bug_in_one_answer_ends_that_answer_only",
        "server/test_http.py::test_an_engine_that_refuses_loses_its_requests_and_not_the_loop",
    ),
    "the time in the queue is looked at only when a server is free (Triton #7512)": (
        "server/test_http.py::test_patience_runs_out_in_the_queue_while_the_engine_is_busy",
        "server/admission/test_admission.py::test_patience_of_a_call_runs_out_while_the_engine_is_busy",
        "server/test_faults.py::test_patience_runs_out_while_the_engine_restarts",
    ),
    "counters drift with timeouts and cancellations, over hours (Triton #8870)": (
        "server/test_batching_traps.py::test_no_counter_drifts",
        "server/test_fault_chaos.py::test_a_hundred_thousand_calls_leave_no_task_and_no_memory_behind",
        "server/test_http.py::test_conservation_and_littles_law_under_a_random_load",
    ),
    "an outer limit on calls starves the batcher (Ray #43288)": (
        "server/test_batching_traps.py::test_batches_fill_while_a_backlog_waits",
    ),
    # the engine
    (
        "the backlog builds up in the engine: places counted from scraped metrics "
        "(llm-d-router #2066)"
    ): (
        "server/test_batching_traps.py::test_the_backlog_waits_here_and_never_in_the_engine",
        "policies/test_contracts.py::test_every_policy_keeps_its_contracts",
    ),
    "a place is given out again before its stream has ended (SGLang router #32491)": (
        "server/test_batching_traps.py::test_a_place_is_held_until_the_last_token_of_its_stream",
    ),
    "the members of a batch enter different steps of the engine": (
        "server/test_vllm_engine.py::test_a_batch_begins_in_one_step",
    ),
    "ready says 200 while nothing moves (SGLang #33858)": (
        "server/test_faults.py::test_an_engine_that_makes_no_tokens_is_replaced",
        "server/test_supervision.py::test_stillness_counts_only_what_was_watched_and_only_when_busy",
        "server/test_faults.py::test_waiting_on_purpose_is_not_standing_still",
    ),
    "a liveness probe ends the gateway in the middle of a recovery": (
        "server/test_faults.py::test_an_engine_that_makes_no_tokens_is_replaced",
        "server/test_engine_starts.py::test_a_restart_that_hangs_is_ended_at_its_limit_and_the_next_one_serves_everyone",
    ),
    (
        "an engine that hangs while it boots is waited for without end, or thrown away and begun "
        "anew without end"
    ): (
        "server/test_engine_starts.py::test_restarts_that_all_hang_are_given_up_after_the_third_each_with_twice_the_time",
        "server/test_engine_starts.py::test_a_first_start_that_hangs_ends_the_gateway_at_its_limit",
        "server/test_engine_starts.py::test_a_start_that_takes_longer_than_the_limit_is_not_thrown_away_for_ever",
        "server/test_vllm_boot.py::test_a_cancelled_start_of_the_engine_leaves_nothing_and_ends_at_once",
        "server/test_engine_boot_faults.py::test_an_engine_stopped_while_it_boots_is_replaced_and_everyone_is_answered",
    ),
    "an idle engine hangs, and the next caller finds out": (
        "server/test_supervision.py::test_an_idle_engine_is_asked_every_ten_seconds_and_is_lost_where_it_is_silent",
        "server/test_engine_boot_faults.py::test_an_idle_engine_that_is_stopped_is_replaced_before_anybody_asks",
    ),
    "the engine is lost and the process stays, or ends with status 0 (vLLM #48966)": (
        "server/test_faults.py::test_a_killed_engine_costs_time_and_nothing_else",
        "server/test_engine_faults.py::test_an_engine_that_cannot_come_back_ends_the_gateway_with_a_non_zero_status",
    ),
    (
        "one prompt kills every engine, its neighbours fail with it, and a few such calls end the "
        "gateway"
    ): (
        "server/test_poison.py::test_ten_poison_calls_cost_a_hundred_innocents_nothing",
        "server/test_poison.py::test_poison_alone_does_not_end_the_gateway",
        "server/test_real_recovery.py::test_ten_poison_calls_cost_a_hundred_innocents_nothing_on_the_real_engine",
    ),
    "what the gateway itself costs is not known": (
        "server/test_cost.py::test_one_call_in_64_tells_the_time_of_its_stages",
        "bench/test_gateway_bench.py::test_the_command_measures_the_edge_beside_a_checkout_and_writes_what_it_found",
    ),
    # the process
    (
        "SIGTERM resets calls: idle connections are closed under a request, the backlog of the "
        "listening socket is dropped"
    ): (
        "server/test_leaving.py::test_no_call_of_50_keep_alive_clients_is_reset_by_sigterm",
        "server/test_leaving.py::test_no_call_of_200_keep_alive_clients_is_reset_by_sigterm",
        "server/test_leaving.py::test_an_answer_under_way_and_the_next_call_on_its_connection_are_both_answered",
        "server/test_leaving.py::test_new_connections_are_passed_over_and_those_that_are_there_are_kept",
    ),
    "a process of a pool that is stopped holds the exit up": (
        "server/test_predictor.py::test_closed_it_leaves_no_process_and_no_thread_whatever_it_does",
        "server/test_leaving.py::test_a_predicting_process_that_is_stopped_does_not_hold_the_exit_up",
    ),
    "SIGHUP ends the process": (
        "server/test_reloading.py::test_a_hangup_at_any_time_ends_nothing",
        "server/test_reloading.py::test_a_gateway_takes_up_keys_and_certificate_and_survives_what_is_wrong",
    ),
    "a log that nobody reads freezes the event loop": (
        "server/test_leaving.py::test_neither_a_log_that_nobody_reads_nor_a_full_disk_stops_a_gateway_or_its_end",
        "server/test_log_writer.py::test_unread_lines_are_dropped_and_counted_and_the_next_one_read_says_so",
        "server/test_log_writer.py::test_a_process_whose_log_nobody_reads_ends",
    ),
    "a full disk leaves half a line, or ends what does not need it": (
        "server/test_recorder.py::test_a_full_disk_leaves_whole_lines_and_once_there_is_room_nothing_is_missing",
        "server/test_recorder.py::test_state_drain_and_metrics_do_not_depend_on_the_file",
        "server/test_recorder.py::test_a_disk_that_hangs_is_waited_for_once_and_not_at_the_end",
    ),
    # arrivals and the model
    (
        "Poisson arrivals that are none: truncated gaps, whole seconds, one seed in every worker, "
        "rescaled ends, drift"
    ): (
        "loadgen/test_timetable.py::test_gaps_are_exponential",
        "loadgen/test_timetable.py::test_counts_are_dispersed_as_poisson_over_short_and_long_windows",
        "loadgen/test_timetable.py::test_the_end_is_not_pinned",
        "loadgen/test_timetable.py::test_no_instant_prefers_a_phase_of_the_second",
        "loadgen/test_timetable.py::test_senders_together_send_the_one_timetable",
        "loadgen/test_pacing.py::test_a_slow_preparation_does_not_shift_what_follows",
        "queueing/test_arrival_audit.py::test_each_disease_is_named_in_the_verdict",
    ),
    "a limit of the client's own hides waiting from the delay (vLLM #54101)": (
        "loadgen/test_closed_loop.py::test_a_limit_in_an_open_loop_counts_the_wait_as_delay_and_says_so",
        "loadgen/test_summary.py::test_every_duration_counts_from_the_intended_instant",
    ),
    "one law for every policy: M/G/1 does not describe a continuously batched engine": (
        "queueing/test_predict_cli.py::test_predict_prints_the_object_of_the_contract",
        "queueing/test_models_against_simulation.py::test_the_mean_is_what_the_policy_does",
    ),
    "retries and closed loops are taken for Poisson arrivals": (
        "server/test_arrivals_seen.py::test_one_call_is_one_arrival_and_retries_are_counted",
        "queueing/test_estimation_verdict.py::test_retrying_clients_are_named_by_their_header",
        "queueing/test_estimation_verdict.py::test_clients_of_a_closed_loop_are_counted",
    ),
}

DEFENDED: dict[str, tuple[str, ...]] = {  # each row of SECURITY.md's table
    "other machines that reach the gateway by mistake": (
        "server/test_security.py::test_a_door_to_other_machines_needs_a_key_or_a_word",
    ),
    "callers without a key": (
        "server/test_security.py::test_every_exception_is_a_route_and_below_admin_all_are_the_operators",
        "server/test_security.py::test_without_a_key_only_open_routes_answer",
        "server/test_security.py::test_the_hot_routes_refuse_before_the_body_is_read",
        "server/test_security.py::test_an_unknown_path_needs_a_key",
    ),
    "keys that leak from the gateway": (
        "server/test_security.py::test_only_digests_are_kept_and_all_are_compared",
        "server/test_security.py::test_short_keys_are_named_by_digest_not_by_text",
        "server/test_security.py::test_key_files_that_others_can_read_are_warned_of",
        "server/test_configuration.py::test_show_config_shows_no_secret",
        "server/test_admin_key.py::test_a_key_is_made_kept_privately_and_gone_at_the_end",
    ),
    "clients that reach the operator's controls": (
        "server/test_admin_key.py::test_trap_behind_nginx_on_this_machine_nobody_drains_calibrates_or_becomes_admin",
        "server/test_security.py::test_trap_draining_and_calibrating_need_the_admin_key_always",
        "server/test_security.py::test_this_machine_needs_no_key_only_where_no_other_reaches_the_gateway_and_none_was_given",
    ),
    "pages in a browser": (
        "server/test_security.py::test_trap_no_page_of_another_origin_calls_admin_with_or_without_a_key",
        "server/test_security.py::test_trap_allowed_origins_open_chat_and_not_admin",
        "server/test_security.py::test_trap_without_keys_a_page_cannot_send_work_without_asking",
        "server/test_security.py::test_without_an_admin_key_only_this_machine_may_call_admin",
        "server/test_security.py::test_cors_is_off_unless_pages_are_named",
    ),
    "requests that two servers read differently": (
        "server/test_request_framing.py::test_trap_a_request_names_its_host_once",
        "server/test_request_framing.py::test_trap_a_trailer_is_no_header",
        "server/test_api_surface.py::test_a_path_with_a_slash_too_many_is_not_redirected_to_the_clients_host",
    ),
    "memory and time held by one client": (
        "server/test_security.py::test_a_body_that_is_too_large_is_413_by_its_length_or_as_it_comes",
        "server/test_request_limits.py::test_a_head_that_does_not_end_is_let_go",
        "server/test_request_limits.py::test_a_body_that_does_not_end_is_let_go",
        "server/test_request_limits.py::test_a_head_of_too_many_bytes_or_headers_is_431",
        "server/test_request_framing.py::test_trap_trailers_and_chunk_extensions_are_bounded_as_a_head_is",
        "server/test_request_framing.py::test_trap_a_request_that_is_answered_is_not_read_to_its_end",
        "server/test_request_framing.py::test_the_rest_of_a_request_that_is_answered_has_little_time",
        "server/test_security.py::test_a_prompt_is_at_most_what_the_operator_says",
        "server/test_security.py::test_json_without_end_is_one_400",
        "server/test_bodies.py::test_a_body_of_too_many_values_reaches_no_parser",
        "server/test_bodies.py::test_a_large_body_is_parsed_in_a_thread",
        "server/admission/test_one_call.py::test_a_small_body_that_asks_for_131072_sequences_is_refused_before_anything_is_built",
        "server/admission/test_one_call.py::test_what_a_client_sizes_is_bounded_before_the_engine_hears_of_it",
        "server/test_real_gateway.py::test_what_one_client_sizes_holds_up_nobody_else",
        "page/test_feed.py::test_viewers_from_one_address_are_bounded_and_others_are_not_shut_out",
        "page/test_feed.py::test_viewers_are_bounded_in_all_and_no_address_is_kept",
        "server/test_memory_given_back.py::test_trap_the_memory_of_every_attack_comes_back",
    ),
    "answers and bodies that are large together": (
        "server/test_answer_size.py::test_an_answer_that_may_be_huge_is_refused_before_it_is_queued",
        "server/test_answer_size.py::test_bodies_of_all_calls_together_have_a_budget",
    ),
    "work without the queue (`/tokenize`, `/detokenize`, `count_tokens`)": (
        "server/test_unqueued.py::test_calls_without_the_queue_count_against_the_rate_of_their_key",
        "server/test_unqueued.py::test_calls_without_the_queue_take_turns",
    ),
    "a key that was revoked (SIGHUP)": (
        "server/test_unqueued.py::test_a_revoked_key_ends_its_stream_of_events",
    ),
    "requests that delay the live prediction": (
        "server/test_questions.py::test_trap_a_question_whose_askers_have_left_is_not_asked",
        "server/test_questions.py::test_different_questions_are_asked_one_at_a_time",
        "server/test_questions.py::test_a_look_waits_for_one_question_at_most",
        "server/test_questions.py::test_the_advice_of_two_who_ask_the_same_is_computed_once",
    ),
    (
        "structured-output definitions that take long to compile (JSON schemas, grammars, "
        "expressions)"
    ): (
        "server/test_real_forms.py::test_a_heavy_form_is_refused_once_and_harms_no_other_call",
        "server/test_real_forms.py::test_a_client_that_leaves_its_heavy_form_stops_the_compilation",
        "server/test_forms.py::test_a_form_that_is_too_large_is_refused_before_anybody_compiles_it",
    ),
    "connections that exhaust the file descriptors": (
        "server/test_connection_room.py::test_probes_are_answered_when_descriptors_run_out",
        "server/test_connection_room.py::test_unfinished_requests_take_the_room_of_nobody",
        "server/test_connection_room.py::test_a_body_that_goes_on_and_a_call_in_service_are_kept",
        "server/test_connection_room.py::test_a_burst_of_unfinished_requests_leaves_room_for_probes",
        "server/test_connection_room.py::test_connections_of_one_address_are_bounded",
    ),
    "limits passed by with another spelling, before servers behind (`--engine http`)": (
        "server/test_endpoints_passed.py::test_a_number_is_sent_as_it_was_read",
        "server/test_endpoints_passed.py::test_what_is_no_number_is_refused",
        "server/test_endpoints_passed.py::test_no_value_passes_the_limit_in_force_by",
        "server/test_endpoints_passed.py::test_vllm_reads_of_a_call_what_was_read_here",
    ),
    "what servers behind answer": (
        "server/test_broken_servers.py::test_calls_that_a_good_server_could_serve_are_served",
        "server/test_broken_servers.py::test_what_one_broken_server_fails_is_a_constant_and_no_share",
    ),
    "headers of servers behind that speak for the gateway's origin": (
        "server/test_passed_headers.py::test_what_a_server_tells_browsers_of_its_own_origin_does_not_come_back",
        "server/test_passed_headers.py::test_what_a_connection_header_names_stays_with_its_connection",
    ),
    "the key of the servers behind": (
        "server/test_odd_probes.py::test_the_key_goes_to_the_origins_of_the_start_alone",
        "server/test_servers_behind.py::test_the_key_is_shown_nowhere",
    ),
    "one request that kills the engine repeatedly": (
        "server/test_poison.py::test_ten_poison_calls_cost_a_hundred_innocents_nothing",
        "server/test_poison.py::test_poison_alone_is_convicted_at_the_second_death_and_refused_for_its_caller_for_a_while",
        "server/test_poison.py::test_poison_alone_does_not_end_the_gateway",
        "server/test_real_recovery.py::test_ten_poison_calls_cost_a_hundred_innocents_nothing_on_the_real_engine",
    ),
    "errors that disclose too much": (
        "server/test_security.py::test_an_error_repeats_at_most_80_characters_of_what_was_sent",
        "server/test_security.py::test_an_error_tells_no_path_and_no_address",
        "server/test_security.py::test_no_error_text_is_longer_than_its_bound_nor_slow_to_make",
        "server/test_vllm_engine.py::test_a_fault_in_the_middle_of_the_template_tells_no_internals",
    ),
    "prompts in logs and records": (
        "server/test_security.py::test_prompts_are_logged_only_where_it_is_asked_for",
    ),
    "changes that cannot be traced": (
        "server/test_audit_trail.py::test_changes_and_drains_are_logged_with_key_address_and_outcome",
        "server/test_audit_trail.py::test_every_denial_is_counted_by_its_reason",
        "server/test_audit_trail.py::test_trap_denials_do_not_fill_the_log",
    ),
    "a log that a client floods, or that is not read": (
        "server/test_log_writer.py::test_one_kind_of_line_has_a_rate_and_the_rest_is_one_line",
        "server/test_log_writer.py::test_the_metric_counts_by_reason",
        "server/test_leaving.py::test_neither_a_log_that_nobody_reads_nor_a_full_disk_stops_a_gateway_or_its_end",
    ),
    "unbounded metric labels": (
        "server/test_security.py::test_every_label_has_a_bound_whatever_clients_and_operators_send",
        "server/test_cost.py::test_policies_beyond_the_bound_share_one_label",
    ),
    "rights in a container": (
        "test_containers.py::test_compose_leaves_no_right_that_nobody_needs",
        "test_containers.py::test_a_target_runs_without_rights_has_a_check_and_its_own_flavour",
        "test_kubernetes.py::test_the_root_file_system_is_read_only_and_what_is_written_has_a_volume",
        "test_kubernetes.py::test_the_network_policy_means_this_pod_and_its_port",
    ),
    "known vulnerabilities in packages": (
        "test_dependency_audit.py::test_every_lock_is_audited",
        "test_dependency_audit.py::test_the_status_says_what_was_found",
        "test_dependency_audit.py::test_no_report_is_no_audit",
        "test_containers.py::test_the_scheduled_audit_is_a_workflow_that_asks_by_the_makefiles_command",
    ),
}


@cache
def _tests_of(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text())
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _missing(tests: tuple[str, ...]) -> list[str]:
    return [
        test for test in tests if test.partition("::")[2] not in _tests_of(test.partition("::")[0])
    ]


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_tests(trap: str) -> None:
    assert TRAPS[trap]
    assert _missing(TRAPS[trap]) == []


def test_every_attack_that_the_security_page_says_is_defended_has_its_tests() -> None:
    """Row by row, in its order; none of the tests is left out of `make test-all`, which runs all
    that there are.
    """
    table = (
        (HERE.parent / "SECURITY.md")
        .read_text()
        .partition("\n## What is protected\n")[2]
        .partition("\n## ")[0]
    )
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    header, rule, *attacks = rows
    assert (header, rule) == ("against", "---")
    assert attacks == list(DEFENDED)
    assert {
        attack: missing
        for attack, tests in DEFENDED.items()
        if (missing := _missing(tests)) or not tests
    } == {}


def test_every_policy_has_hand_written_decisions_over_several_waiting_requests() -> None:
    several: dict[str, int] = dict.fromkeys(POLICIES, 0)
    for row in ROWS:
        policy, seen, _, _ = row.values
        several[policy.name] += len(seen.waiting) > 1
    assert min(several.values()) >= 3, several
