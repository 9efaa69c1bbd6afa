"""Every key that users of LLaMA-Factory, Gym and Axolotl are known to write is one that we know."""

from gymjax.config import known
from gymjax.config.aliases import RENAMED, SPELLINGS, STRUCTURED, VALUED
from gymjax.config.sections import SECTIONS
from gymjax.config.source import Entry
from gymjax.config.translate import TYPES, translate

WRITTEN_BY_USERS = """
model_name_or_path trust_remote_code adapter_name_or_path cache_dir base_model lora_model_dir tokenizer_config
stage do_train do_eval do_predict rl reward_model finetuning_type adapter
lora_rank lora_alpha lora_dropout lora_target additional_target use_rslora use_dora loraplus_lr_ratio
loraplus_lr_embedding pissa_init pissa_iter pissa_convert create_new_adapter
lora_r lora_target_linear lora_target_modules lora_modules_to_save peft_use_rslora peft_use_dora
peft_init_lora_weights lora_rank_pattern freeze_trainable_layers freeze_trainable_modules freeze_extra_modules
unfrozen_parameters quantization_bit quantization_method quantization_type double_quantization load_in_4bit
load_in_8bit bnb_config_kwargs use_galore galore_target galore_rank galore_update_interval galore_scale use_apollo
apollo_rank apollo_scale use_badam badam_mode badam_switch_interval use_adam_mini use_muon pure_bf16 optimizer
dataset dataset_dir eval_dataset template cutoff_len max_samples val_size train_on_prompt mask_history packing
neat_packing streaming buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_num_workers
tokenized_path ignore_pad_token_for_loss enable_thinking default_system tool_format datasets test_datasets
val_set_size chat_template sequence_len sample_packing train_on_inputs dataset_prepared_path pad_to_sequence_len
excess_length_strategy shuffle_merged_datasets
per_device_train_batch_size gradient_accumulation_steps learning_rate num_train_epochs max_steps lr_scheduler_type
warmup_ratio warmup_steps weight_decay max_grad_norm optim adam_beta1 adam_beta2 seed bf16 fp16
gradient_checkpointing micro_batch_size num_epochs lr_scheduler cosine_min_lr_ratio
flash_attn rope_scaling shift_attn enable_liger_kernel use_unsloth neftune_noise_alpha attn_implementation
flash_attention rope_theta context_parallel_size plugins
pref_beta pref_loss pref_ftx simpo_gamma dpo_label_smoothing kto_chosen_weight kto_rejected_weight ref_model ppo_epochs
ppo_target grpo_group_size grpo_beta grpo_clip_range gspo_group_size rl_beta orpo_alpha trl
output_dir overwrite_output_dir logging_steps save_steps save_strategy save_total_limit save_only_model eval_strategy
eval_steps plot_loss report_to run_name resume_from_checkpoint load_best_model_at_end metric_for_best_model
saves_per_epoch evals_per_epoch wandb_project wandb_entity wandb_name use_tensorboard auto_resume_from_checkpoints
early_stopping_patience hub_model_id
export_dir export_size export_device export_legacy_format export_hub_model_id export_quantization_bit
temperature top_p top_k max_new_tokens repetition_penalty predict_with_generate infer_backend
deepspeed fsdp dist_config dp_shard_size tensor_parallel_size fsdp_config
early_stopping_steps data_seed ddp_timeout dataloader_num_workers use_fast_tokenizer low_cpu_mem_usage push_to_hub
per_device_eval_batch_size lora_alpha_pattern min_p do_sample stop profile_steps dp_size fsdp_size compile_cache_dir
disable_tqdm moe_aux_loss_coef router_z_loss_coef export_dtype loss_scale min_lr_ratio lr_scheduler_kwargs adam_epsilon
"""


def test_every_key_is_known():
    unknown = [
        key for key in WRITTEN_BY_USERS.split() if "unknown key" in "".join(translate([Entry(key, "x")]).problems)
    ]
    assert unknown == []


def test_each_key_is_of_one_kind():
    tables = [set(TYPES), set(RENAMED), set(VALUED), set(STRUCTURED) - set(TYPES), set(known.ACCEPTED)]
    tables.append(set(known.UNSUPPORTED))
    merged = set().union(*tables)
    assert len(merged) == sum(len(table) for table in tables)


def test_every_mapping_leads_to_a_field():
    targets = set(RENAMED.values()) | set(SPELLINGS) | set(known.UNSUPPORTED_VALUES)
    targets |= {native for choices in VALUED.values() for meaning in choices.values() for native in meaning}
    assert targets <= set(TYPES)


def test_every_mapped_value_is_one_that_its_key_takes():
    for choices in VALUED.values():
        for meaning in choices.values():
            entries = [Entry(native, value) for native, value in meaning.items()]
            assert translate(entries).problems == []
    for native, spellings in SPELLINGS.items():
        assert translate([Entry(native, next(iter(spellings)))]).problems == []


def test_no_key_has_two_sections():
    no_fields = {"min_lr", "evals_per_epoch", "saves_per_epoch"}
    assert sum(len(kind.__dataclass_fields__) for kind in SECTIONS.values()) == len(TYPES.keys() - no_fields)
