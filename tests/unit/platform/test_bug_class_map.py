"""Every class of bug that other control planes had, and every fault, has a test; here is which.

Those below stand in no other file.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import update

from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.scheduler.render.render import render
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import JobRow
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import parse_spec, validate_spec

TESTS = Path(__file__).parents[2]
IMAGE = "registry.example/worker@sha256:" + "0" * 64

CLASSES: dict[str, tuple[str, ...]] = {
    "1: names over 63 characters that fail after they were accepted": (
        "test_every_valid_job_name_fits_every_derived_name",
        "test_a_name_over_the_budget_is_refused_with_what_it_makes",
        "test_the_longest_names_fit_all_that_the_cluster_makes_of_them",
    ),
    "2: names and labels that no cluster takes": (
        "test_a_fault_names_field_value_what_is_allowed_and_the_nearest_valid_value",
        "test_a_suggested_name_is_valid",
        "test_any_text_becomes_a_labels_value",
    ),
    "3: topology tables that are wrong or have gaps": (
        "test_a_topology_that_a_generation_has_not_is_refused_with_the_nearest",
        "test_what_is_no_topology_at_all_is_refused",
        "test_a_slice_that_comes_with_two_sizes_of_host_must_say_which",
        "test_an_accelerator_type_is_told_how_a_slice_is_named",
        "test_every_listed_topology_is_valid_and_divides_into_hosts",
    ),
    "4: negative, zero and huge counts": (
        "test_a_count_that_is_none_is_refused",
        "test_a_number_of_any_size_in_any_field_is_a_fault_of_that_field",
        "test_counts_of_the_cluster_are_strict_and_bounded",
    ),
    "5: text spliced into a shell or into YAML": (
        "test_an_entrypoint_reaches_the_process_byte_for_byte",
        "test_a_users_environment_arrives_byte_for_byte",
        "test_words_arrive_through_the_api_server_byte_for_byte",
    ),
    "6: the environment set twice, resources replaced": (
        "test_each_name_of_the_environment_stands_once_and_the_users_wins_over_defaults",
        "test_names_that_the_cluster_sets_are_refused",
        "test_a_resource_that_is_given_leaves_the_others_as_they_are",
    ),
    "7: the latest condition by order or by text": (
        "test_order_and_times_of_conditions_decide_nothing",
        "test_times_of_every_offset_are_read",
    ),
    "8: an end that is lost, and a job that is sent again after it": (
        "test_what_goes_after_its_time_to_live_stays_as_it_ended",
        "test_a_run_that_has_ended_has_ended_whatever_becomes_of_its_objects",
        "test_a_workload_that_somebody_else_deletes_is_lost_and_never_sent_again",
        "test_the_mirror_alone_ends_no_run",
        "test_a_final_state_is_never_left_and_every_live_one_can_fail_or_be_cancelled",
    ),
    "9: a status stuck between two sources": (
        "test_a_job_that_ray_ended_is_believed_after_a_while",
        "test_a_rayjob_whose_submitter_hangs_stays_running",
        "test_a_rayjob_that_was_stopped_is_no_success",
        "test_a_word_of_a_later_kuberay_changes_no_state",
        "test_any_rayjob_says_something_in_words",
    ),
    "10: a watch that ends in silence": (
        "test_a_watch_that_breaks_loses_nothing",
        "test_what_went_while_nobody_watched_is_seen_to_be_gone",
        "test_older_states_that_come_late_change_nothing",
        "test_silence_is_found_and_ended",
        "test_credentials_that_ran_out_are_told_of_and_renewed",
        "test_waits_are_spread_over_the_whole_range_and_bounded",
    ),
    "11: submitted twice": (
        "test_a_submit_that_is_sent_again_with_its_key_finds_its_job",
        "test_of_many_submits_with_one_key_at_once_one_stores_a_job",
        "test_wherever_an_apply_breaks_off_the_next_one_finishes_it",
    ),
    "11 too: killed, or left without an answer, between two steps of a submit": (
        "test_a_submit_survives_a_kill_at_any_step",
        "test_a_submit_comes_through_whatever_the_api_server_answers",
        "test_two_that_both_believe_to_lead_double_nothing",
    ),
    "12: a name used again": (
        "test_a_run_is_joined_by_label_and_uid_never_by_name",
        "test_another_of_the_same_name_is_neither_seen_nor_deleted_nor_suspended",
        "test_one_that_is_being_deleted_is_waited_for",
        "test_what_is_somebody_elses_is_refused_by_name_and_left_alone",
        "test_a_service_that_a_jobset_would_take_for_its_own_is_refused_by_name",
    ),
    "13: logs that end too soon, lose their end or stall the server": (
        "test_a_log_read_in_pieces_is_the_log",
        "test_half_a_character_at_the_end_of_a_finished_log_is_shown_as_replaced",
        "test_bytes_that_are_not_utf_8_are_replaced",
        "test_the_last_lines_of_a_huge_log_are_found_without_reading_it_all",
        "test_it_begins_before_there_are_pods_and_ends_after_they_are_gone",
        "test_a_pod_that_takes_anothers_place_is_another_restart",
        "test_bytes_of_any_kind_come_as_they_are",
        "test_a_line_of_a_mebibyte",
        "test_a_collector_that_dies_loses_nothing_and_the_next_doubles_nothing",
        "test_draining_waits_for_the_ends_of_all_logs",
    ),
    "14: retries without end, restarts counted anew": (
        "test_a_failed_pod_restarts_all_of_it_until_it_may_no_more",
        "test_a_run_suspended_for_days_is_neither_sent_again_nor_stopped_for_its_time_limit",
        "test_restarts_never_fall",
        "test_a_name_that_is_taken_is_waited_for_and_not_for_ever",
        "test_patience_grows_is_bounded_and_is_never_the_same_for_two",
        "test_an_api_server_that_is_away_is_told_of_and_asked_ever_more_seldom",
    ),
    "15: traps of parsing": (
        "test_words_that_older_yaml_takes_for_something_else_are_text",
        "test_whole_numbers_are_those_of_yaml_1_2",
        "test_a_duration_is_a_number_of_seconds_or_a_fault",
        "test_text_that_is_no_spec_is_one_clear_message",
        "test_any_plain_data_is_a_spec_or_a_spec_error",
        "test_a_body_that_is_too_large_is_refused_before_it_is_held",
        "test_every_part_of_a_spec_is_frozen_and_closed",
        "test_a_spec_of_a_later_version_is_shown_still",
    ),
}
"""Tests by what they hold off; the numbers are those of the notes the list was made from."""


FAULTS: dict[str, tuple[str, ...]] = {
    "killed at each step of a submit": (
        "test_a_submit_survives_a_kill_at_any_step",
        "test_a_submit_to_ray_survives_a_kill_too",
        "test_a_process_that_is_killed_within_a_request_loses_and_doubles_nothing",
    ),
    "500, 429 or no answer, also once it is stored": (
        "test_a_submit_comes_through_whatever_the_api_server_answers",
        "test_a_cancel_comes_through_whatever_the_api_server_answers",
    ),
    "410 in a watch": (
        "test_watches_that_break_all_the_time_tell_the_truth_in_the_end",
        "test_a_history_that_is_compacted_all_the_time_loses_nothing",
    ),
    "half a line of JSON; events doubled and out of order": (
        "test_watches_that_break_all_the_time_tell_the_truth_in_the_end",
        "test_older_states_that_come_late_change_nothing",
    ),
    "objects that somebody else deletes": (
        "test_a_workload_that_somebody_else_deletes_is_lost_and_never_sent_again",
        "test_a_pod_that_somebody_deletes_is_a_restart_at_most",
    ),
    "objects that go after their time to live": ("test_what_goes_after_its_time_to_live_stays_as_it_ended",),
    "a database that is locked": ("test_a_database_that_another_holds_is_waited_for_and_then_told_of",),
    "a disk that is full": (
        "test_a_disk_that_is_full_stores_nothing_by_half_and_goes_on_once_there_is_room",
        "test_a_full_disk_is_a_503_that_says_so_and_the_worker_may_send_again",
    ),
    "a clock that jumps": (
        "test_a_clock_that_jumps_puts_nothing_out_of_order",
        "test_a_cluster_whose_clock_jumps_changes_no_state",
        "test_a_control_plane_whose_clock_jumps_ends_no_run_before_its_time",
    ),
    "two leaders for one lease period": (
        "test_two_that_both_believe_to_lead_double_nothing",
        "test_never_two_lead_at_once",
    ),
    "the leader lost": (
        "test_no_submit_is_lost_or_doubled_while_one_of_two_replicas_is_killed_and_started_again",
        "test_who_leads_is_lost_and_another_one_goes_on",
        "test_a_holder_that_falls_silent_gives_up_before_another_takes_over",
    ),
    "nodes that never come": (
        "test_a_run_that_is_admitted_and_gets_no_nodes_waits_and_for_too_long_ends_and_says_for_what",
    ),
}
"""Tests by the fault they put in the way: nothing lost, nothing doubled, nothing stuck."""


def test_the_map_names_tests_that_are_there() -> None:
    found = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    maps = (*CLASSES.values(), *FAULTS.values())
    assert not [name for names in maps for name in names if name not in found]
    assert all(maps)


def spec(**more: Any) -> dict[str, Any]:
    accelerator = {"kind": "tpu", "generation": "v5p", "topology": "4x4x4"}
    return {"name": "a", "accelerator": accelerator, "kubernetes": {"image": IMAGE}} | more


def fields_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        validate_spec(data)
    return [fault.field for fault in caught.value.faults]


@pytest.mark.parametrize("value", [-1, 2**31, 2**63, 1.5, True, "1", None, []])
@pytest.mark.parametrize("field", ["max_restarts", "ttl_seconds", "grace_seconds", "memory_gib", "cpu"])
def test_counts_of_the_cluster_are_strict_and_bounded(field: str, value: Any) -> None:
    if value is None and field in ("memory_gib", "cpu"):
        return  # null is their default
    assert fields_of(spec(kubernetes={"image": IMAGE, field: value})) == [f"kubernetes.{field}"]


@pytest.mark.parametrize("slices", [-1, 0, 2**31, 1.5, True, "2"])
def test_a_number_of_slices_is_a_whole_number(slices: Any) -> None:
    accelerator = {"kind": "tpu", "generation": "v5p", "topology": "4x4x4", "slices": slices}
    assert fields_of(spec(accelerator=accelerator)) == ["accelerator.slices"]


def test_a_resource_that_is_given_leaves_the_others_as_they_are() -> None:
    def resources(**kubernetes: Any) -> dict[str, Any]:
        found = render(validate_spec(spec(kubernetes={"image": IMAGE, **kubernetes}))).workload
        (container,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        return dict(container["resources"])

    default, given = resources(), resources(cpu=3)
    assert given["requests"] == {**default["requests"], "cpu": "3"}
    assert given["limits"] == default["limits"]
    given = resources(memory_gib=7)
    assert given["requests"] == {**default["requests"], "memory": "7Gi"}
    assert given["limits"] == {**default["limits"], "memory": "7Gi"}


@pytest.mark.parametrize("text", ["off", "on", "1h30m", "1..2..3", "'90'", "-1", "0", ".nan", ".inf", "1:30", "[]"])
def test_a_duration_is_a_number_of_seconds_or_a_fault(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(f"name: a\nruntime: {{max_seconds: {text}}}")
    assert [fault.field for fault in caught.value.faults] == ["runtime.max_seconds"]
    assert parse_spec("name: a\nruntime: {max_seconds: 90}").runtime.max_seconds == 90
    assert parse_spec("name: a\nruntime: {max_seconds: null}").runtime.max_seconds is None


def test_a_spec_of_a_later_version_is_shown_still(settings: Settings, store: Store) -> None:
    job = store.create_job(parse_spec("name: a"))
    later = {**job.spec, "of_a_later_version": {"x": 1}, "train": {**job.spec["train"], "mood": "good"}}
    with store.database.write() as connection:
        connection.execute(update(JobRow).values(spec=later))
    service = Service(store, settings)
    assert service.get_job(job.id).spec == later
    assert [each.id for each in service.list_jobs().items] == [job.id]
    shown = yaml.safe_load(Reader(service).job(job.id).spec_yaml)
    assert json.dumps(shown, sort_keys=True) == json.dumps(later, sort_keys=True)
