"""Options of drafting that users of vLLM and transformers know; what to write here."""

from collections.abc import Mapping

NOT_OF_SPECULATION: Mapping[str, str] = {
    "model": "it is called draft",
    "quantization": "it is called draft_quantization",
    "assistant_model": "it is called draft",
    "num_assistant_tokens": "it is called num_speculative_tokens",
    "prompt_lookup_num_tokens": (
        "use method='prompt_lookup', with num_speculative_tokens for how many it drafts"
    ),
    "num_lookahead_slots": "it is called num_speculative_tokens",
    "num_assistant_tokens_schedule": "use draft_length_policy='heuristic' or 'constant'",
    "assistant_confidence_threshold": (
        "use confidence_threshold, with draft_length_policy='confidence'"
    ),
    "assistant_early_exit": "use method='early_exit' with early_exit_layers",
    "max_matching_ngram_size": "it is called prompt_lookup_max",
    "ngram_prompt_lookup_max": "it is called prompt_lookup_max",
    "ngram_prompt_lookup_min": "leave it out: the longest match drafts",
    "prompt_lookup_min": "leave it out: the longest match drafts",
    "draft_tensor_parallel_size": "leave it out: the [draft] table of a layout shards the draft",
    "custom_class": "give LLM a drafter, or the name of a registered one as method",
    "max_model_len": "leave it out: it is the target's",
    "disable_by_batch_size": "leave it out: draft_length_policy='adaptive' drafts where it pays",
    "disable_padded_drafter_batch": "leave it out: shapes are static",
    "parallel_drafting": "leave it out: tokens are drafted one after another",
    "rejection_sample_method": "it is called verification",
    "acceptance_method": "it is called verification",
    "draft_sample_method": "leave it out: drafts are sampled as the target is",
    "posterior_threshold": "leave it out: verification never changes what the target would say",
    "posterior_alpha": "leave it out: verification never changes what the target would say",
    "speculative_token_tree": "use num_drafts for several drafts, which are verified as a tree",
    "suffix_decoding_max_tree_depth": "use method='suffix' with num_speculative_tokens",
}
"""Of `SpeculativeConfig`. A dict for an `LLM` may have vLLM's `model` and `quantization`."""
