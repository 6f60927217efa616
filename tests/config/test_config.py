from pathlib import Path

import pytest
import yaml

from composer_packing.common.errors import ConfigError
from composer_packing.config.loading import load_config
from composer_packing.config.schema import TrainConfig
from tests.tools import ROOT

YAMLS = ROOT / "yamls"
SMALLEST = [
    "data.docs.vocab_size=8192",
    "max_duration=1000tok",
    "global_train_batch_size=8",
    "device_train_microbatch_size=2",
]


@pytest.fixture
def empty(tmp_path: Path) -> str:
    path = tmp_path / "empty.yaml"
    path.write_text("{}")
    return str(path)


def message(path: str, *overrides: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, world_size)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", sorted(YAMLS.rglob("*.yaml")), ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_yaml_file_of_the_project_is_read(path: Path, world_size: int) -> None:
    assert isinstance(load_config(str(path), [], world_size), TrainConfig)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"seed": 5, "optimizer": {"lr": 0.5}, "max_seq_len": 64}))
    config = load_config(str(path), [*SMALLEST, "optimizer.lr=2e-5", "max_seq_len=32"], 2)
    assert config.optimizer.lr == 2e-5
    assert config.seed == 5
    assert config.optimizer.eps == 1e-6
    assert config.row_len == 64
    assert config.device_batch_size(2) == 4
    assert config.buffer_size(2) == 40
    assert config.optimizer.betas == (0.9, 0.98)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("objective=clm", "objective=clm: must be mlm, causal or sft"),
        (
            "objective=causal",
            "model.causal=False: with objective=causal each token would see the token that it must predict",
        ),
        ("objective=sft", "model.causal=False: with objective=sft each token would see the token that it must predict"),
        ("autoresume=true", "autoresume=true: needs run_name, by which the next start finds the checkpoints"),
        ("save_num_checkpoints_to_keep=0", "save_num_checkpoints_to_keep=0: must be at least 1, or -1 for all"),
        ("load_weights_only=true", "load_weights_only=true: needs load_path"),
        (
            "train_loader.masking_cooldown_schedule_type=stair",
            "train_loader.masking_cooldown_schedule_type='stair' needs final_masking_ratio too",
        ),
        ("sequnce_packing=true", "there is no key sequnce_packing"),
        ("max_seq_length=8", "max_seq_length; did you mean max_seq_len?"),
        ("train_loader.packing_bufer_size=3", "did you mean train_loader.packing_buffer_size?"),
        ("lr=1", "there is no key lr; did you mean optimizer.lr?"),
        ("optimizer.lr.x=1", "optimizer.lr"),
        ("device_train_microbatch_size=auto", "'auto'"),
        ("max_seq_len=null", "max_seq_len"),
        ("optimizer.lr=fast", "optimizer.lr: Value 'fast'"),
        ("optimizer=3", "optimizer=3: "),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: "),
        ("seed=${missing}", "seed: Interpolation key 'missing' not found"),
        ("seed", "seed: an override is written key=value"),
        ("max_seq_len=7", "max_seq_len=7: must be at least 8"),
        ("global_train_batch_size=7", "global_train_batch_size=7: must be a positive multiple of 2"),
        ("global_train_batch_size=0", "global_train_batch_size=0: must be a positive multiple of 2"),
        ("device_train_microbatch_size=0", "device_train_microbatch_size=0: must be at least 1"),
        (
            "train_loader.batch_size_warmup_min_size=3",
            "batch_size_warmup_min_size=3: must be a positive multiple of 2",
        ),
        ("global_train_batch_size=-4", "global_train_batch_size=-4: must be a positive multiple of 2"),
        (
            "train_loader.batch_size_warmup_min_size=4",
            "train_loader.batch_size_warmup_min_size=4 needs batch_size_warmup_tokens too",
        ),
        (
            "train_loader.batch_size_warmup_tokens=5ba",
            "train_loader.batch_size_warmup_tokens='5ba' needs batch_size_warmup_min_size too",
        ),
        ("train_loader.final_masking_ratio=0.1", "final_masking_ratio=0.1 needs masking_ratio_cooldown_tokens too"),
        (
            "train_loader.masking_ratio_cooldown_tokens=5ba",
            "train_loader.masking_ratio_cooldown_tokens='5ba' needs final_masking_ratio too",
        ),
        (
            "train_loader.masking_ratio_cooldown_start_tokens=5ba",
            "train_loader.masking_ratio_cooldown_start_tokens='5ba' needs final_masking_ratio too",
        ),
        (
            "train_loader.masking_ratio_step_size=0.1",
            "train_loader.masking_ratio_step_size=0.1 needs final_masking_ratio too",
        ),
        ("train_loader.packing_strategy=ffd", "packing_strategy=ffd: must be best_fit or subset_sum"),
        (
            "train_loader.masking_cooldown_schedule_type=foo",
            "train_loader.masking_cooldown_schedule_type='foo' must be one of linear, stair",
        ),
        ("train_loader.packing_buffer_size=8", "packing_buffer_size=8: must exceed the 8 sequences"),
        ("train_loader.packing_prefetch_factor=-1", "packing_prefetch_factor=-1: must be at least 0"),
        ("mlm_probability=0", "mlm_probability=0.0: must be above 0 and at most 1"),
        ("eval_loader.mlm_probability=1.5", "eval_loader.mlm_probability=1.5: "),
        ("model.vocab_size=600", "data.docs.vocab_size=8192: must be at least 512 and not exceed model.vocab_size=600"),
        ("data.docs.vocab_size=100", "data.docs.vocab_size=100: must be at least 512"),
        ("data.docs=null", "data: names 0 sources; it must be one of docs, text, jsonl, parquet, huggingface, mds or"),
        ("data.mds.folder=x", "data: names 2 sources: docs, mds; it must be one of"),
        ("data.mds.foldr=x", "there is no key data.mds.foldr; did you mean data.mds.folder?"),
        ("data.streaming.streams.a.remot=x", "streams.a.remot; did you mean data.streaming.streams.NAME.remote?"),
        ("data.csv.train=[x]", "there is no key data.csv"),
        ("data.text.train=x", "data.text.train: "),
        ("train_loader.num_workers=-1", "train_loader.num_workers=-1: must be at least 0 and at most 256, or null"),
        ("train_loader.prefetch_factor=0", "train_loader.prefetch_factor=0: must be at least 1"),
        ("eval_loader.max_documents=0", "eval_loader.max_documents=0: must be at least 1"),
        ("model.hidden_size=127", "model.hidden_size=127 must be a multiple"),
        ("model.num_hidden_layers=0", "model.num_hidden_layers=0"),
        ("model.attn_out_dropout=1.0", "model.attn_out_dropout=1.0"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9, 1.0]: each must be at least 0 and below 1"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0: must be at least 0"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be at least 0"),
        ("scheduler.alpha_f=-1", "scheduler.alpha_f=-1.0: must be at least 0 and below 2**32"),
        (
            "console_log_interval=1ep",
            "console_log_interval='1ep' must be a duration such as 1000tok, 50sp, 10ba or 0.1dur",
        ),
        ("seed=-1", "seed=-1: must be at least 0 and below 2**32"),
        ("seed=99999999999", "seed=99999999999: must be at least 0 and below 2**32"),
        ("train_loader.packing_buffer_size=0", "packing_buffer_size=0: must exceed"),
        ("train_loader.final_masking_ratio=0", "final_masking_ratio=0.0: must be above 0 and at most 1, or null"),
        ("optimizer.lr=inf", "optimizer.lr=inf"),
        ("optimizer.lr=[1", "optimizer.lr=[1: "),
        ("seed=${", "seed=${: "),
        ("run_name='", "run_name=': "),
        ("optimizer.betas={}", "optimizer.betas={}: "),
        ("model.norm_eps=-1", "model.norm_eps=-1.0 must be above 0"),
        ("model.initializer_range=nan", "model.initializer_range=nan"),
        ("model.global_rope_theta=0", "model.global_rope_theta=0.0"),
        ("device=tpu", "device=tpu: must be cpu or gpu, or null"),
        ("eval_interval=10m", "eval_interval='10m' must be a duration"),
        ("eval_interval=0.0001dur", "eval_interval='0.0001dur' comes to 0tok; it must be at least 1tok"),
        ("eval_interval=nandur", "eval_interval='nandur' must be a duration"),
        ("save_interval=soon", "save_interval='soon' must be a duration"),
        ("console_log_interval=0ba", "console_log_interval='0ba' comes to 0ba; it must be at least 1ba"),
        ("max_duration=0.5dur", "max_duration='0.5dur' must be a duration such as 1000tok, 50sp, 10ba"),
        ("max_duration=3ep", "max_duration='3ep' must be a duration"),
        ("max_duration=0tok", "max_duration='0tok' comes to 0tok"),
        ("max_duration=1000", "max_duration='1000' must be a duration"),
        ("max_duration=", "max_duration="),
        ("max_duration=-5tok", "max_duration='-5tok' must not be negative"),
        ("scheduler.t_warmup=infdur", "scheduler.t_warmup='infdur' must be a duration"),
        ("scheduler.t_warmup=-0.1dur", "scheduler.t_warmup='-0.1dur' must not be negative"),
        ("scheduler.t_warmup=", "scheduler.t_warmup="),
        ("scheduler.t_decay=5ba", "scheduler.t_decay=5ba must be in tok: it counts back from max_duration=1000tok"),
        (
            "scheduler.t_decay=1001tok",
            "scheduler.t_warmup=0tok and t_decay=1001tok together must not exceed max_duration=1000tok",
        ),
        ("scheduler.t_decay=1.5dur", "scheduler.t_warmup=0tok and t_decay=1500tok together must not exceed"),
        ("train_loader.batch_size_warmup_tokens=0tok", "batch_size_warmup_tokens='0tok' comes to 0tok"),
        ("train_loader.masking_ratio_cooldown_tokens=nan", "masking_ratio_cooldown_tokens='nan'"),
        ("train_loader.masking_ratio_cooldown_start_tokens=-1ba", "start_tokens='-1ba' must not be negative"),
    ],
)
def test_a_mistake_is_reported_in_one_line_with_key_and_value(empty: str, override: str, words: str) -> None:
    assert words in message(empty, *SMALLEST, override)


TEXT = ["data.docs=null", "data.text.train=[x]", "data.text.tokenizer=y"]
JSONL = ["data.docs=null", "data.jsonl.train=[x]", "data.jsonl.tokenizer=y"]
STREAM = ["data.docs=null", "data.streaming.streams.a.local=x"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*TEXT, "data.text.train=[]"], "data.text.train=[]: give at least one file or folder"),
        ([*TEXT, "data.text.val=[]"], "data.text.val=[]: give at least one file or folder"),
        ([*TEXT, "data.text.document_per=line"], "data.text.document_per=line: must be file or blank_line"),
        ([*JSONL, "data.jsonl.val_share=1"], "data.jsonl.val_share=1.0: must be above 0 and below 1"),
        ([*JSONL, "data.jsonl.on_error=pass"], "data.jsonl.on_error=pass: must be stop or skip"),
        (JSONL[:2], "data.jsonl.tokenizer is missing; set it in the file or as data.jsonl.tokenizer=VALUE"),
        (
            [*JSONL, "objective=sft", "model.causal=true"],
            "objective=sft: data.jsonl has no loss masks; prepare examples by python -m",
        ),
        (["data.docs=null", "data.mds.train=x"], "data.mds.folder is missing"),
        (
            ["data.docs=null", "data.mds.folder=x", "data.mds.bytes_dtype=float32"],
            "data.mds.bytes_dtype=float32: must be uint8, uint16, uint32, uint64, int8",
        ),
        (["data.docs=null", "data.streaming.column=x"], "data.streaming.streams={}: give at least one"),
        ([*STREAM, "data.streaming.streams.a.choose=0"], "data.streaming.streams.a.choose=0: must be above 0"),
        ([*STREAM, "data.streaming.streams.a.proportion=nan"], "streams.a.proportion=nan: must be above 0"),
    ],
)
def test_a_mistake_in_a_source_is_reported_in_one_line(empty: str, overrides: list[str], words: str) -> None:
    assert words in message(empty, *SMALLEST, *overrides)


def test_a_share_of_the_training_becomes_a_number_in_the_unit_of_its_length_and_other_units_stay(empty: str) -> None:
    for length, tenth in (("1000tok", "100tok"), ("50sp", "5sp"), ("10ba", "1ba")):
        config = load_config(
            empty,
            [
                *SMALLEST,
                f"max_duration={length}",
                "scheduler.t_warmup=3ba",
                "scheduler.t_decay=0.1dur",
                "eval_interval=0.1dur",
                "save_interval=7sp",
                "console_log_interval=2000tok",
                "train_loader.batch_size_warmup_min_size=2",
                "train_loader.batch_size_warmup_tokens=0.1dur",
                "train_loader.final_masking_ratio=0.1",
                "train_loader.masking_ratio_cooldown_start_tokens=0.1dur",
                "train_loader.masking_ratio_cooldown_tokens=0.1dur",
            ],
            1,
        )
        assert (config.scheduler.t_warmup, config.save_interval, config.console_log_interval) == (
            "3ba",
            "7sp",
            "2000tok",
        )
        loader = config.train_loader
        shares = (config.scheduler.t_decay, config.eval_interval, loader.batch_size_warmup_tokens)
        assert {*shares, loader.masking_ratio_cooldown_start_tokens, loader.masking_ratio_cooldown_tokens} == {tenth}


@pytest.mark.parametrize("objective", ["causal", "sft"])
def test_keys_of_masking_are_refused_if_no_token_is_masked(empty: str, objective: str) -> None:
    cooldown = ("train_loader.final_masking_ratio=0.1", "train_loader.masking_ratio_cooldown_tokens=100tok")
    text = message(empty, *SMALLEST, f"objective={objective}", "model.causal=true", *cooldown)
    assert f"masking_ratio_cooldown_tokens=100tok: with objective={objective} nothing is masked; leave it out" in text
    for key in ("mlm_probability", "eval_loader.mlm_probability"):
        text = message(empty, *SMALLEST, f"objective={objective}", "model.causal=true", f"{key}=0.2")
        assert f"{key}=0.2: with objective={objective} nothing is masked; leave it out" in text


def test_a_warmup_does_not_start_above_the_batch_size_that_it_leads_to(empty: str) -> None:
    warmup = ["train_loader.batch_size_warmup_tokens=5ba", "train_loader.batch_size_warmup_min_size=10"]
    assert "train_loader.batch_size_warmup_min_size=10 must not exceed the batch size after the warmup, 8" in message(
        empty, *SMALLEST, *warmup
    )


def test_a_cooldown_and_its_start_are_counted_in_the_same_unit(empty: str) -> None:
    cooldown = ["train_loader.masking_ratio_cooldown_tokens=5ba", "train_loader.final_masking_ratio=0.1"]
    load_config(empty, [*SMALLEST, *cooldown, "train_loader.masking_ratio_cooldown_start_tokens=0tok"], 1)
    assert "train_loader.masking_ratio_cooldown_start_tokens='9tok' must be in ba, the unit of" in message(
        empty, *SMALLEST, *cooldown, "train_loader.masking_ratio_cooldown_start_tokens=9tok"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "mlm_probability=0.05",
            "train_loader.final_masking_ratio=0.1 must not exceed the mask ratio before the cooldown, 0.05",
        ),
        (
            "train_loader.masking_cooldown_schedule_type=stair",
            "train_loader.masking_ratio_step_size=None must be above 0",
        ),
        (
            "train_loader.masking_ratio_step_size=0.1",
            "train_loader.masking_ratio_step_size=0.1 needs masking_cooldown_schedule_type='stair'",
        ),
    ],
)
def test_a_cooldown_that_makes_no_sense_is_reported_by_the_names_of_its_keys(
    empty: str, override: str, words: str
) -> None:
    cooldown = ["train_loader.masking_ratio_cooldown_tokens=5ba", "train_loader.final_masking_ratio=0.1"]
    load_config(empty, [*SMALLEST, *cooldown], 1)
    assert words in message(empty, *SMALLEST, *cooldown, override)


@pytest.mark.parametrize("step", ["0", "-0.1", "nan", "1.1"])
def test_a_stair_has_a_height(empty: str, step: str) -> None:
    cooldown = ["train_loader.masking_ratio_cooldown_tokens=5ba", "train_loader.final_masking_ratio=0.1"]
    stair = [*cooldown, "train_loader.masking_cooldown_schedule_type=stair"]
    load_config(empty, [*SMALLEST, *stair, "train_loader.masking_ratio_step_size=0.1"], 1)
    assert "must be above 0 and at most 1 with masking_cooldown_schedule_type='stair'" in message(
        empty, *SMALLEST, *stair, f"train_loader.masking_ratio_step_size={step}"
    )


def test_a_missing_key_is_named_with_two_ways_to_set_it(empty: str) -> None:
    assert "max_duration is missing; set it in the file or as max_duration=VALUE" in message(empty)


def test_the_largest_seed_leaves_room_for_the_rank_that_is_added_to_it(empty: str) -> None:
    load_config(empty, [*SMALLEST, "seed=4294967295"], 1)
    load_config(empty, [*SMALLEST, "seed=4294967294"], 2)
    assert "seed=4294967295: 2 ranks add up to 1 to it" in message(empty, *SMALLEST, "seed=4294967295", world_size=2)


def test_batches_must_divide_by_ranks_and_rows(empty: str) -> None:
    load_config(empty, SMALLEST, 4)
    assert "multiple of 16, which is 8 ranks times device_train_microbatch_size=2" in message(
        empty, *SMALLEST, world_size=8
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- 1\n- 2\n", "holds no keys"),
        (b"a: [1\n", "run.yaml: "),
        (b"\xff\xfe\x00", "run.yaml: "),
        (b"seed: 1\nsede: 2\n", "there is no key sede; did you mean seed?"),
        (b"", "max_duration is missing"),
        (b"5", "give the path of a YAML file"),
        (b"null: 3", "run.yaml: "),
    ],
)
def test_a_file_that_is_not_a_configuration_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert words in message(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml: No such file or directory" in message(str(tmp_path / "nowhere.yaml"))
    assert "Is a directory" in message(str(tmp_path))


def test_the_precision_is_one_that_the_device_has() -> None:
    config = TrainConfig()
    assert config.precision_on("cpu") == "fp32"
    assert config.precision_on("gpu") == "amp_bf16"
    config.precision = "amp_bf16"
    with pytest.raises(ConfigError, match="precision=amp_bf16: on the cpu it must be fp32"):
        config.precision_on("cpu")


@pytest.mark.parametrize(
    ("overrides", "resumes"),
    [
        ([], False),
        (["run_name=a"], True),
        (["run_name=a", "save_overwrite=true"], False),
        (["run_name=a", "save_overwrite=true", "autoresume=true"], True),
        (["run_name=a", "autoresume=false"], False),
    ],
)
def test_a_run_with_a_name_resumes_unless_it_writes_over_its_checkpoints(
    empty: str, overrides: list[str], resumes: bool
) -> None:
    assert load_config(empty, [*SMALLEST, *overrides], 1).resumes is resumes
