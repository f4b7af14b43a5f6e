"""The classes of hostile and clumsy input, and the tests that guard each of them."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

GUARDS = {
    "what train-draft writes can be read": {
        "cli/test_train_draft.py": [
            "test_names_that_need_quotes",
            "test_a_licence_that_cannot_be_written_is_refused_before_hours_of_work",
            "test_an_output_that_orbax_could_not_read_again_is_refused",
        ],
    },
    "GGUF: counts, types, nesting": {
        "checkpoints/test_gguf_header.py": [
            "test_what_a_file_declares_is_checked_before_memory_is_taken",
            "test_mutants_of_a_header_end_soon_and_take_little_memory",
        ],
        "checkpoints/test_hostile.py": ["test_the_last_tensor_of_another_size"],
        "fuzz/test_mutants.py": ["test_damage_is_refused_or_harmless"],
    },
    "templates: time, memory, output, errors": {
        "text/test_chat_template.py": [
            "test_what_a_template_may_not_do",
            "test_a_process_that_was_killed_is_started_again",
        ],
    },
    "config.json and recipes: sizes, types, ends of texts": {
        "checkpoints/test_hostile.py": [
            "test_a_config_that_declares_too_much_or_nonsense",
            "test_ends_of_texts_that_are_no_ids",
            "test_nesting_without_end",
            "test_a_config_of_gigabytes_is_not_read",
        ],
    },
    "paths that leave their directory": {
        "checkpoints/test_bad_checkpoints.py": [
            "test_index_that_leaves_its_directory",
            "test_index_of_links_into_a_hub_cache",
        ],
    },
    "control characters and length of messages": {
        "checkpoints/test_hostile.py": [
            "test_messages_are_safe_to_print",
            "test_a_name_with_control_characters",
        ],
        "cli/test_screen.py": ["test_text_streams_and_cannot_command_the_terminal"],
    },
    "convert: full disks, two at once, kills": {
        "checkpoints/test_conversion.py": [
            "test_a_failure_leaves_nothing",
            "test_a_limit_on_the_size_of_files_is_said",
            "test_two_at_once",
            "test_a_killed_conversion_leaves_no_half_checkpoint",
        ],
    },
    "several processes: joining, signals, deaths": {
        "test_distributed.py": [
            "test_a_peer_that_never_comes_is_named",
            "test_a_roll_call",
            "test_a_roll_call_is_not_disturbed_by_strangers",
            "test_sigterm_ends_all_within_seconds",
            "test_a_dead_process_ends_the_other",
            "test_a_peer_that_stops_is_named",
            "test_a_stopped_process_ends_the_other",
        ],
    },
    "closed pipes and streams, Ctrl-C": {
        "cli/test_generate.py": ["test_ctrl_c_ends_quietly_and_keeps_what_was_printed"],
        "cli/test_screen.py": ["test_ctrl_c_is_not_lost"],
        "cli/test_streams.py": [
            "test_a_pipe_that_nobody_reads",
            "test_an_output_that_is_full",
            "test_a_closed_stream_is_said",
            "test_ctrl_c_during_imports",
        ],
    },
    "threads: keys and cold starts": {
        "test_wrong_types.py": [
            "test_unseeded_requests_of_threads_have_keys_of_their_own",
            "test_a_cold_start_of_threads_compiles_each_program_once",
        ],
    },
    "programs in memory": {
        "test_continuous_batching.py": ["test_programs_that_were_used_last_are_kept"],
        "engine/test_few_programs.py": ["test_random_requests_share_few_programs"],
        "sampling/test_processors.py": ["test_sizes_are_rounded_so_that_few_programs_are_compiled"],
    },
    "fetching, checksums, devices, long prompts, panics": {
        "checkpoints/test_fetch.py": [
            "test_a_fetch_that_was_killed_leaves_nothing_for_good",
            "test_a_damaged_cache_is_fetched_again",
        ],
        "checkpoints/test_hostile.py": [
            "test_a_pipe_or_a_device_in_place_of_a_model",
            "test_a_panic_of_the_tokenizers_library_is_an_error",
        ],
        "cli/test_prompt_sources.py": ["test_a_file_without_an_end_is_refused"],
        "test_wrong_types.py": ["test_a_prompt_of_megabytes_is_not_tokenized"],
    },
    "wrong types from Python": {
        "test_wrong_types.py": ["test_prompts", "test_sampling_params", "test_messages"],
    },
}


@pytest.mark.parametrize("kind", GUARDS)
def test_every_class_is_guarded(kind):
    for file, names in GUARDS[kind].items():
        body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        known = {each.name for each in body if isinstance(each, ast.FunctionDef)}
        assert known >= set(names), f"{file} lacks {set(names) - known}"
