"""The failure catalogue as an index: every row names the tests that hold it, and those tests exist.

`docs/reliability.md` describes the rows to users. A test named `command: X` is the fault X of `faults.py`
or `oddities.py`, met through the command line by `test_commands.py`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.reliability.oddities import FAULTS

ROOT = Path(__file__).parents[2]
COMMAND = "command: "

MODELS, INPUTS, WRITING, RESUMING, DETERMINISM = (
    f"tests/reliability/test_{subject}.py" for subject in ("models", "inputs", "writing", "resuming", "determinism")
)
T, R, V = "tests/test_transport.py", "tests/test_transport_refusals.py", "tests/votes/test_collect.py"
LORA, OPEN, LOAD = "tests/checkpoints/test_lora.py", "tests/test_open.py", "tests/data/test_load.py"
SPLITS, SHARE = "tests/data/test_splits.py", "tests/torture/test_share.py"

CATALOGUE: dict[str, tuple[str, ...]] = {
    # Models
    "missing key": (
        "command: missing key, fine-tune", "command: missing key, target", f"{R}::test_missing_tensor_is_refused",
        "tests/tasks/test_loading.py::test_missing_extra_and_misshapen_tensors_are_named",
    ),
    "shape differs": ("command: shape differs", f"{R}::test_other_shapes_are_refused"),
    "resized vocabulary": (
        "command: resized vocabulary", "tests/checkpoints/test_vocabulary.py::test_rows_follow_their_tokens",
        "tests/checkpoints/test_vocabulary.py::test_without_tokenizers_other_heights_are_an_error",
    ),
    "extra head": (
        "command: extra head", "command: extra tensor, strict", f"{MODELS}::test_an_extra_head_is_listed",
        f"{R}::test_a_head_only_the_fine_tune_has_follows_the_policy",
    ),
    "tied weights": (
        f"{MODELS}::test_tied_weights_vote_once_and_stay_tied",
        "tests/checkpoints/test_names.py::test_tied_copies_on_disk_move_with_their_tensor",
    ),
    "buffers": (
        f"{MODELS}::test_buffers_come_from_the_target_whatever_the_mask",
        f"{T}::test_integer_buffers_are_copied_from_the_target",
    ),
    "quantised": ("command: quantised weights", f"{R}::test_quantised_weights_are_refused_by_name"),
    "frozen or unused": (
        f"{MODELS}::test_unused_parameters_abstain_and_are_reported",
        f"{V}::test_frozen_parameters_do_not_vote_and_unused_ones_are_reported",
    ),
    "LoRA": (
        "command: LoRA with a key nobody knows", "command: LoRA of another model",
        f"{LORA}::test_every_key_is_used_or_named", f"{LORA}::test_the_wrong_base_is_found_by_its_values",
    ),
    "tuned equals base": ("command: tuned equals base", f"{R}::test_tuned_equal_to_base_is_refused"),
    "wrong order, not descended": (
        "command: not descended", f"{MODELS}::test_a_stranger_goes_through_when_forced",
        f"{MODELS}::test_base_and_fine_tune_the_wrong_way_round", f"{R}::test_not_descended_is_refused_unless_forced",
    ),
    "NaN or Inf": (
        "command: NaN in base", "command: NaN in tuned", "command: NaN in target", "command: NaN in a copied tensor",
        "command: output overflows", "command: alpha that breaks the model", f"{R}::test_nan_in_an_input_names_tensor_and_file",
    ),
    "no silent no-op": (
        "command: mask that keeps nothing", "command: update lost in rounding", f"{R}::test_all_dropped_is_refused",
        f"{R}::test_an_update_lost_in_rounding_is_refused", f"{V}::test_silence_is_refused",
    ),
    # Files
    "truncated or corrupt safetensors": (
        "command: truncated safetensors", "command: huge header claimed", f"{OPEN}::test_truncated_safetensors_are_named",
        f"{SHARE}::test_a_share_of_the_series_is_clean",
    ),
    "index outside the folder": (
        "command: index outside the folder", f"{OPEN}::test_an_index_that_leaves_its_folder_is_refused",
    ),
    "index and shards disagree": (
        "command: index and shards disagree", "command: shard missing",
        f"{OPEN}::test_an_index_that_disagrees_with_its_shards_is_refused",
    ),
    "malicious pickle": (
        "command: malicious pickle", "command: code in a config",
        f"{OPEN}::test_a_pickle_with_code_is_refused_and_never_runs",
        f"{OPEN}::test_sparse_and_foreign_entries_are_refused",
        "tests/tasks/test_loading.py::test_code_in_a_checkpoint_never_runs_unasked",
    ),
    "decompression bombs": (
        f"{INPUTS}::test_a_pickle_that_claims_more_than_it_holds",
        f"{INPUTS}::test_a_compressed_pickle_is_refused_before_it_is_unpacked",
        f"{INPUTS}::test_a_parquet_file_that_claims_a_billion_rows", f"{LOAD}::test_a_decompression_bomb_is_refused",
    ),
    "tokenizer of another model": (
        "command: tokenizer damaged", "command: tokenizer missing", "command: tokenizer of another model",
    ),
    "not what it seems": (
        "command: weights behind a loop of links", "command: model that is a data file",
        "command: config file that is a folder", f"{INPUTS}::test_a_pipe_is_no_checkpoint",
    ),
    "YAML duplicates and typos": (
        "command: YAML key twice", "command: YAML typo", "command: YAML with an object", "command: YAML with aliases",
        "tests/test_mergeconfig.py::test_mistakes_are_named",
    ),
    "cache keys": (
        "command: half a vote of other data", "command: votes of another target",
        f"{RESUMING}::test_compare_keeps_units_of_other_task_settings_apart",
        f"{RESUMING}::test_a_frozen_weight_is_part_of_a_votes_identity",
        f"{RESUMING}::test_another_engine_does_not_go_on_with_a_vote",
        "tests/test_comparison.py::test_another_setting_reads_no_old_unit",
    ),
    # Data
    "NaN sample": (
        "command: NaN sample", f"{V}::test_one_bad_sample_in_two_hundred_abstains_alone",
        f"{V}::test_a_bad_sample_is_named_and_too_many_abort",
    ),
    "label outside the set": (
        "command: label outside the set", "command: label -100", f"{LOAD}::test_a_label_outside_the_set_is_named",
    ),
    "empty data": (
        "command: empty data", "command: data file that is a folder", "command: data file that cannot be read",
        "command: only a test split", f"{LOAD}::test_empty_folders_and_unknown_files_are_refused",
    ),
    "fewer than k": (
        "command: fewer than k", f"{INPUTS}::test_allow_fewer_takes_what_there_is",
        f"{SPLITS}::test_a_class_with_too_few_is_named",
    ),
    "duplicates and leakage": (
        "command: leakage", f"{SPLITS}::test_planted_duplicates_are_found_and_both_places_named",
        f"{SPLITS}::test_duplicates_inside_a_split_are_a_note",
        "tests/test_comparison.py::test_an_example_on_two_sides_is_refused",
    ),
    "CSV strings": (
        "command: CSV line with too many fields", "command: CSV in UTF-16", "command: JSON line with a column twice",
        "command: JSON line without an end", "command: nested columns", f"{INPUTS}::test_csv_values_stay_strings",
        f"{LOAD}::test_strings_stay_strings", f"{LOAD}::test_bad_csv_is_refused_with_its_place",
    ),
    "truncated image": (
        "command: truncated image", f"{LOAD}::test_damaged_images_are_found_while_loading",
        f"{INPUTS}::test_postscript_is_never_decoded",
    ),
    # Process
    "values that make no sense": (
        "command: no examples per class", "command: batch size 0", "command: no processes", "command: negative length",
        "command: seed that no generator takes", "command: learning rate that is no number",
        "command: alpha that is no number", "command: memory that is no size", "command: empty name", "command: device without numbers",
    ),
    "output is or lies in an input": (
        "command: output is an input", "command: output inside an input, by link", "command: votes over the weights",
        "command: ids over the data", "command: data inside an overwritten output", "command: JSON over the results",
        "command: work folder inside an input",
        f"{R}::test_output_inside_an_input_is_refused",
    ),
    "output is no file": (
        "command: votes over a folder", "command: JSON over a pipe", "command: name too long",
        "command: work folder that is a file", "command: folder for weights that is a file",
        "command: output beside a file",
    ),
    "non-empty output": (
        "command: non-empty output", f"{R}::test_non_empty_output_needs_overwrite_and_is_swapped_whole",
    ),
    "two writers": (
        f"{WRITING}::test_a_held_lock_is_code_seven", f"{WRITING}::test_merge_is_told_of_another_writer_too",
        f"{WRITING}::test_a_lock_is_taken_once_by_its_holder_and_never_by_another_thread",
        f"{SHARE}::test_a_share_of_the_series_is_clean",
    ),
    "full disk": (
        f"{WRITING}::test_a_disk_without_room_is_known_before_the_first_byte",
        f"{WRITING}::test_a_flush_that_fails_on_the_way_is_not_forgotten", f"{SHARE}::test_a_share_of_the_series_is_clean",
    ),
    "kill": (
        f"{SHARE}::test_a_share_of_the_series_is_clean", f"{WRITING}::test_a_writer_killed_between_the_renames_loses_nothing",
        f"{RESUMING}::test_finished_shards_are_not_written_again", f"{RESUMING}::test_a_resumed_vote_keeps_engine_samples_and_notes",
        f"{RESUMING}::test_a_resumed_mean_vote_asks_no_sample_twice",
        f"{RESUMING}::test_one_file_adapters_and_matched_rows_go_on_too",
        "tests/scale/test_parallel.py::test_one_group_of_processes",
        "tests/scale/test_resume.py::test_an_interrupted_transport_goes_on_with_the_same_bits",
        "tests/test_comparison.py::test_a_killed_run_loses_one_unit_and_gives_the_same_json",
        "tests/test_comparison.py::test_what_was_said_on_the_way_is_said_again",
        "tests/test_finetuning.py::test_resumed_equals_uninterrupted",
    ),
    "damaged state": (
        "tests/checkpoints/test_state.py::test_no_damage_goes_unseen", f"{SHARE}::test_a_share_of_the_series_is_clean",
        "tests/scale/test_resume.py::test_a_damaged_beginning_is_written_again",
    ),
    "out of memory": (
        f"{WRITING}::test_out_of_memory_is_an_error_unless_the_batch_may_shrink",
        f"{WRITING}::test_the_batch_halves_only_when_allowed_and_is_recorded",
    ),
    # Promises without a row of their own
    "every tensor accounted for": (f"{T}::test_manifest_accounts_for_every_tensor_and_verify_finds_changes",),
    "reports are safe to open": (
        "tests/report/test_report.py::test_no_name_becomes_markup",
        "tests/report/test_report.py::test_nothing_is_fetched_from_elsewhere",
        "tests/test_card.py::test_hostile_names_stay_text",
    ),
    "determinism": (
        f"{DETERMINISM}::test_same_seed_same_settings_same_bits", f"{DETERMINISM}::test_what_changes_bits_is_in_the_manifest",
    ),
}  # fmt: skip


@cache
def _tests_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", CATALOGUE)
def test_every_row_has_tests_that_exist(row: str) -> None:
    assert CATALOGUE[row]
    for name in CATALOGUE[row]:
        if name.startswith(COMMAND):
            assert name.removeprefix(COMMAND) in FAULTS, name
        else:
            path, _, function = name.partition("::")
            assert function in _tests_in(path), name


def test_every_fault_belongs_to_a_row() -> None:
    listed = {name.removeprefix(COMMAND) for names in CATALOGUE.values() for name in names if name.startswith(COMMAND)}
    assert set(FAULTS) == listed


def test_the_documented_exit_codes_are_those_of_the_errors() -> None:
    from gradfix import errors
    from gradfix.cli import INTERRUPTED

    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}
    assert codes == {1, 2, 3, 4, 5, 6, 7, 8} and INTERRUPTED == 130
    assert {fault.code for fault in FAULTS.values()} == codes - {1, 7}
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    for code in (0, *sorted(codes - {1}), INTERRUPTED):
        assert f"| {code} |" in text
    for row in CATALOGUE:
        assert f"| {row} |" in text, row
