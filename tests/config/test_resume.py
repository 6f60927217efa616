"""Every key of the configuration declares what may change when a run resumes."""

import dataclasses

import pytest

from composer_packing.common.resume import Resume, declared_keys, key, keys_that_are
from composer_packing.config.schema import TrainConfig
from composer_packing.model.config import ModernBertConfig

BATCHES = """
objective max_seq_len global_train_batch_size device_train_microbatch_size mlm_probability seed
train_loader.packing_strategy train_loader.packing_buffer_size
train_loader.batch_size_warmup_min_size train_loader.batch_size_warmup_tokens
train_loader.masking_ratio_cooldown_tokens train_loader.masking_ratio_cooldown_start_tokens
train_loader.final_masking_ratio train_loader.masking_cooldown_schedule_type train_loader.masking_ratio_step_size
"""

FREE = """
max_duration load_path load_weights_only restart_changed_data autoresume run_name device precision eval_interval
save_folder save_interval save_overwrite save_num_checkpoints_to_keep progress_bar log_to_console console_log_interval
data.cache_folder data.mds.val data.streaming.streams.NAME.val data.streaming.cache_limit
model.initializer_range
train_loader.num_workers train_loader.prefetch_factor train_loader.packing_prefetch_factor
eval_loader.mlm_probability eval_loader.max_documents
scheduler.t_warmup scheduler.t_decay scheduler.alpha_f
"""

WEIGHTS = """
model.vocab_size model.hidden_size model.intermediate_size model.num_hidden_layers model.num_attention_heads
model.global_attn_every_n_layers model.local_attention model.global_rope_theta model.local_rope_theta model.norm_eps
"""

TRAINING = """
model.attn_out_dropout model.causal optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay
"""


@pytest.mark.parametrize(
    ("resume", "names"),
    [(Resume.BATCHES, BATCHES), (Resume.FREE, FREE), (Resume.WEIGHTS, WEIGHTS), (Resume.TRAINING, TRAINING)],
)
def test_the_keys_that_declare_each_answer_are_these(resume: Resume, names: str) -> None:
    """Old checkpoints hold the values of the keys from which batches follow, so these must not change unnoticed."""
    assert keys_that_are(TrainConfig, resume) == names.split()


def test_all_other_keys_are_those_of_a_source_and_are_covered_by_a_fingerprint() -> None:
    others = keys_that_are(TrainConfig, Resume.FINGERPRINT)
    assert {name.split(".")[0] for name in others} == {"data"}
    assert {name.split(".")[1] for name in others} == {
        *("docs", "text", "jsonl", "parquet", "huggingface", "mds", "streaming"),
    }


def test_a_key_that_declares_nothing_is_an_error() -> None:
    @dataclasses.dataclass
    class Forgotten:
        seed: int = key(1, Resume.BATCHES)
        new: int = 2

    with pytest.raises(TypeError, match=r"^Forgotten.new does not declare what may change when a run resumes$"):
        declared_keys(Forgotten)


def test_keys_within_an_optional_dataclass_or_a_dict_of_them_are_found() -> None:
    declared = declared_keys(TrainConfig)
    assert declared["data.mds.folder"] is Resume.FINGERPRINT
    assert declared["data.streaming.streams.NAME.choose"] is Resume.FINGERPRINT
    assert declared["model.causal"] is declared_keys(ModernBertConfig)["causal"] is Resume.TRAINING
