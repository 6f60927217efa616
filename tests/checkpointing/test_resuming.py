import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from streaming import StreamingDataLoader
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from composer_packing import (
    BufferedIterable,
    GreedyBestFitSequencePacker,
    SequencePacker,
    SubsetSumSequencePacker,
    Tail,
)
from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep
from composer_packing.checkpointing.packed_dataset import PackedDataset, settings_that_must_match
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig, TrainLoaderConfig
from composer_packing.config.sources import DataConfig
from composer_packing.data.open_source import TrainingData, open_source
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.training.batches import train_batches
from composer_packing.training.dataspec import packed_dataspec
from tests.tools.array_documents import DocumentDataset
from tests.tools.numbered import Numbered
from tests.tools.packers import new_packer
from tests.tools.reference import masked_documents
from tests.tools.resumed import assert_same, check_resumes_from_every_batch, saved_and_read, taken
from tests.tools.runs import VOCABULARY, config_of, documents_of, read_as
from tests.tools.written_sources import run_over, sources, write_all

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

HOW = [(workers, depth) for workers in (0, 2) for depth in (0, 1, 8)]
"""Number of worker processes, and number of batches that the thread keeps ready."""

KINDS = [*sources(Path())]


def scheduled(num_workers: int = 0, depth: int = 2, **more: Any) -> TrainConfig:
    """A run with a batch-size warmup and a mask-ratio cooldown, both within the first two epochs of 60 documents."""
    loader = TrainLoaderConfig(
        num_workers=num_workers,
        packing_prefetch_factor=depth,
        batch_size_warmup_min_size=4,
        batch_size_warmup_tokens="800tok",
        masking_ratio_cooldown_start_tokens="400tok",
        masking_ratio_cooldown_tokens="1200tok",
        final_masking_ratio=0.1,
        **more,
    )
    return config_of(train_loader=loader)


def made(config: TrainConfig, documents: DocumentDataset | None = None) -> Lockstep:
    return train_batches(documents_of(60) if documents is None else documents, config, VOCABULARY)


@pytest.mark.parametrize(
    ("num_workers", "depth", "strategy"),
    [*((workers, depth, "subset_sum") for workers, depth in HOW), *((0, depth, "best_fit") for depth in (0, 1, 8))],
)
def test_a_run_resumes_from_every_batch_as_if_it_had_not_stopped(num_workers: int, depth: int, strategy: str) -> None:
    config = scheduled(num_workers, depth, packing_strategy=strategy)
    batches = check_resumes_from_every_batch(lambda: made(config), epochs=2 if num_workers else 3)
    rows = [len(batch["input_ids"]) for _, batch in batches]
    ratios = [float(batch["mask_prob"]) for _, batch in batches]
    assert {2, 3, 4} == set(rows), "some stops lie within the warmup"
    assert ratios[0] == pytest.approx(0.3)
    assert len(set(ratios)) > 4, "some stops lie within the cooldown"
    assert ratios[-1] == pytest.approx(0.1)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingData]:
    """The source of each kind. Each is opened once."""
    folder = tmp_path_factory.mktemp("written")
    write_all(folder)
    return {kind: open_source(run_over(config)) for kind, config in sources(folder).items()}


@pytest.mark.parametrize(("kind", "how"), list(zip(KINDS, itertools.cycle(HOW), strict=False)))
def test_every_source_resumes_from_every_batch(
    kind: str, how: tuple[int, int], opened: dict[str, TrainingData]
) -> None:
    num_workers, depth = how
    source = opened[kind]
    config = run_over(DataConfig(), num_workers, device_train_microbatch_size=1)
    config.train_loader.packing_prefetch_factor = depth
    check_resumes_from_every_batch(lambda: train_batches(source.train.documents, config, source.tokenizer.vocabulary))


@pytest.mark.parametrize("objective", ["causal", "sft"])
def test_other_objectives_resume_too(objective: str) -> None:
    documents = documents_of(60)
    if objective == "sft":
        rng = np.random.default_rng(1)
        offsets = np.concatenate([documents._starts, documents._ends[-1:]])
        loss_mask = (rng.random(len(documents._tokens)) < 0.5).astype(np.uint8)
        documents = DocumentDataset(documents._tokens, offsets, 16, loss_mask)
    check_resumes_from_every_batch(lambda: made(config_of(objective=objective), documents))


def test_three_stops_in_one_epoch_change_nothing() -> None:
    undisturbed, _ = taken(made(scheduled()), range(2))
    found: list[Batch] = []
    state = None
    for count in (2, 3, 1, 1000):
        batches = made(scheduled())
        if state is not None:
            batches.load_state_dict(state)
        epochs = itertools.chain.from_iterable(itertools.repeat(batches, 2))
        found += itertools.islice(epochs, count)
        state = saved_and_read(batches.state_dict())
        assert count == 1000 or state["epoch"] == 0
        batches.close()
    assert_same(found[: len(undisturbed)], [batch for _, batch in undisturbed])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_can_return_to_an_earlier_state(num_workers: int) -> None:
    """A training loop may do so when the loss has exploded. The workers have read further by then."""
    batches = made(scheduled(num_workers, 3))
    first = list(batches)
    state = saved_and_read(batches.state_dict())
    second = list(batches)
    rest = list(itertools.islice(batches, 3))
    batches.load_state_dict(state)
    assert_same(list(batches), second)
    assert_same(list(itertools.islice(batches, 3)), rest)
    assert len(first) > 5
    batches.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_iterator_made_before_a_state_was_loaded_takes_no_batch(depth: int) -> None:
    batches = made(scheduled(0, depth))
    state = saved_and_read(batches.state_dict())
    expected = list(itertools.islice(batches, 3))
    batches.load_state_dict(state)
    old = iter(batches)
    assert_same(next(old), expected[0])
    batches.load_state_dict(state)
    assert next(old, None) is None
    assert_same(list(itertools.islice(batches, 3)), expected)
    batches.close()

    source = [[{"input_ids": [5, 6, 7]}] * 4] * 9
    packer = new_packer(SubsetSumSequencePacker, source, 4, 2, 16, 12)
    first = packer.state_dict()
    for loaded in (packer, BufferedIterable(packer, depth)):
        iterator = iter(loaded)
        next(iterator)
        loaded.load_state_dict(first)
        if loaded is packer:
            with pytest.raises(
                RuntimeError, match="this iterator is no longer valid: a newer one was made, or a state was loaded"
            ):
                next(iterator)
        else:
            assert next(iterator, None) is None


ASKED: list[int] = []
"""Indices of the documents that were read."""


class Recorded(DocumentDataset):
    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        ASKED.extend(np.asarray(indices).tolist())
        return super().__getitems__(indices)


def test_nothing_is_read_again_and_the_state_holds_only_the_documents_that_wait() -> None:
    documents = read_as(Recorded, documents_of(60))
    ASKED.clear()
    config = scheduled(depth=0)
    batches = made(config, documents)
    asked, states = [0], []
    for _ in range(4):
        for _ in batches:
            states.append(batches.state_dict())
            asked.append(len(ASKED))
    everything = list(ASKED)
    sizes = []
    for state, read in zip(states, asked[1:], strict=True):
        waiting = state["stream"]["source"]["waiting"]
        assert waiting["tokens"].numel() == 2 * waiting["account"]["waiting"], "uint16"
        assert len(waiting["documents"]["length"]) < 2 * config.buffer_size(1)
        sizes.append(len(str(saved_and_read(state))))
        ASKED.clear()
        again = made(config, documents)
        again.load_state_dict(state)
        while len(ASKED) < len(everything) - read:
            list(again)
        assert ASKED[: len(everything) - read] == everything[read:]
    assert max(sizes[-5:]) < 2 * max(sizes[:5])


@given(st.integers(0, 9999), st.sampled_from(list(Tail)), st.booleans())
def test_a_snapshot_stays_the_same_while_the_packer_continues(seed: int, tail: Tail, fits_best: bool) -> None:
    """A snapshot shares the arrays of the packer: a write into them would show here."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 80)
    source = [[{"input_ids": rng.integers(0, 70_000, length)} for length in some] for some in np.split(lengths, 20)]
    kind = GreedyBestFitSequencePacker if fits_best else SubsetSumSequencePacker
    packer: SequencePacker = new_packer(kind, source, 4, 2, 12, 9, tail=tail)
    snapshots, at_once = [], []
    for _ in range(2):
        for _ in packer:
            snapshots.append(packer.snapshot())
            at_once.append(packer.state_dict())
    assert_same([snapshot() for snapshot in snapshots], at_once)


@pytest.mark.parametrize("kind", [GreedyBestFitSequencePacker, SubsetSumSequencePacker])
@pytest.mark.parametrize("tail", list(Tail))
def test_masks_drawn_by_numpy_and_a_source_without_a_position_resume_too(
    kind: type[SequencePacker], tail: Tail, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(3)
    source = [[{"input_ids": rng.integers(5, 60, rng.integers(1, 9))} for _ in range(4)] for _ in range(12)]

    def buffered(depth: int) -> BufferedIterable[Batch]:
        return BufferedIterable(
            new_packer(kind, source, 4, 2, 16, 12, pad_token_id=0, mask_token_id=4, tail=tail), depth
        )

    batches = buffered(3)
    undisturbed: list[Any] = []
    for epoch in range(2):
        for batch in batches:
            undisturbed.append([batch, epoch, saved_and_read(batches.state_dict())])
    for number, (_, epoch, state) in enumerate(undisturbed):
        again = buffered(number % 3)
        again.load_state_dict(state)
        rest = [batch for _ in range(epoch, 2) for batch in again]
        assert_same(rest, [batch for batch, _, _ in undisturbed[number + 1 :]])
        again.close()
    batches.close()
    assert "the source has no state of its own: " in caplog.text


def test_a_state_with_other_settings_is_refused_and_each_setting_is_named() -> None:
    source = [[{"input_ids": [5, 6, 7]}] * 4] * 4
    state = new_packer(SubsetSumSequencePacker, source, 4, 2, 16, 12).state_dict()
    with pytest.raises(
        ValueError, match=r"settings: mask_prob was 0.3, is 0.2; out_pseq_len was 16, is 32; packer was"
    ):
        new_packer(GreedyBestFitSequencePacker, source, 4, 2, 32, 12, mask_prob=0.2).load_state_dict(state)
    with pytest.raises(ValueError, match="has version 0; this packer reads 1"):
        new_packer(SubsetSumSequencePacker, source, 4, 2, 16, 12).load_state_dict(state | {"version": 0})


def test_a_source_that_knows_its_position_is_asked_for_it() -> None:
    rng = np.random.default_rng(3)
    source = [{"input_ids": rng.integers(5, 60, rng.integers(1, 9))} for _ in range(48)]
    asked: list[int] = []

    class Documents(Dataset[Any]):
        def __len__(self) -> int:
            return len(source)

        def __getitem__(self, number: int) -> Any:
            asked.append(number)
            return source[number]

    def made(kind: Any, prefetch: int = 2, buffer_size: int = 12) -> Lockstep:
        loader = kind(Documents(), 4, sampler=DistributedSampler(Documents(), 1, 0, seed=7), collate_fn=list)
        packer = new_packer(SubsetSumSequencePacker, loader, 4, 2, 16, buffer_size, tail=Tail.CARRY)
        return Lockstep(packer, prefetch)

    batches = check_resumes_from_every_batch(lambda: made(StatefulDataLoader), epochs=3)
    # With a large buffer much of an epoch is packed after all of it was read.
    assert_same(check_resumes_from_every_batch(lambda: made(StatefulDataLoader, 0, 48), epochs=3)[0][1], batches[0][1])

    _, states = taken(made(StatefulDataLoader, 0), range(1))
    asked.clear()
    again = made(StatefulDataLoader, 0)
    again.load_state_dict(states[-1])
    taken(again, range(1))
    assert len(asked) < 16, "documents that were trained on are not read again"

    data = PackedDataset(made(StatefulDataLoader))
    data.load_state_dict(data.state_dict(0, True))


def test_a_state_without_a_position_of_the_source_is_resumed_by_reading_the_source_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Streaming's loader has such a state, None, over a dataset that is not Streaming's."""
    rng = np.random.default_rng(3)
    source = [{"input_ids": rng.integers(5, 60, rng.integers(1, 9))} for _ in range(48)]

    def made() -> Lockstep:
        loader: Any = StreamingDataLoader(source, 4, collate_fn=list)
        return Lockstep(new_packer(SubsetSumSequencePacker, loader, 4, 2, 16, 12), prefetch=2)

    check_resumes_from_every_batch(made)
    assert "the source has no state of its own: " in caplog.text


def test_a_streaming_data_loader_over_a_streaming_dataset_is_refused_as_it_does_not_count_documents() -> None:
    packer = new_packer(SubsetSumSequencePacker, [[{"input_ids": [5, 6, 7]}] * 4] * 4, 4, 2, 16, 12)
    state = packer.state_dict()
    position = {"epoch": 0, "sample_in_epoch": 28, "num_canonical_nodes": 1, "shuffle_seed": 9}
    with pytest.raises(
        ValueError,
        match=r"^a StreamingDataLoader cannot be resumed: it does not count documents, so its state",
    ):
        packer.load_state_dict(state | {"source": position})
    assert packer.epoch == -1


def test_batches_without_a_position_say_so() -> None:
    batches = Lockstep(Numbered(3), prefetch=1)
    assert PackedDataset(batches).state_dict(0, True) is None
    for nowhere in (batches, BufferedIterable([1, 2], 1)):
        with pytest.raises(TypeError, match="has no state that could be saved"):
            nowhere.state_dict()
    assert PackedDataset([]).state_dict(0, True) is None
    for restart_changed in (False, True):
        with pytest.raises(
            ConfigError, match=r"^the data cannot resume .*: a list of batches has no position; take the"
        ):
            PackedDataset([], restart_changed=restart_changed).load_state_dict(None)
    nested = Lockstep(BufferedIterable(Numbered(3), 1), prefetch=1)
    assert len(list(nested)) == 3
    nested.close()
    batches.close()


def packed(config: TrainConfig, data: str = "a", restart_changed: bool = False) -> PackedDataset:
    return PackedDataset(made(config), settings_that_must_match(config, "t", data), restart_changed)


def test_a_checkpoint_of_other_data_or_settings_is_refused_and_every_difference_is_named() -> None:
    first = packed(scheduled())
    state = first.state_dict(0, True)
    changed = scheduled(packing_strategy="best_fit")
    changed.seed = 18
    with pytest.raises(ConfigError) as caught:
        packed(changed, data="b").load_state_dict(state)
    (line,) = str(caught.value).splitlines()
    assert "data was a, is b; seed was 17, is 18; train_loader.packing_strategy was subset_sum, is best_fit;" in line
    assert "restart_changed_data=true" in line
    with pytest.raises(ConfigError, match="from its checkpoint: it has no position in the data; give"):
        packed(scheduled()).load_state_dict(None)
    assert state is not None
    older = state | {"settings": state["settings"] | {"version": 0}}
    with pytest.raises(ConfigError, match="version was 0, is 1"):
        packed(scheduled()).load_state_dict(older)


def test_settings_that_do_not_change_batches_may_change() -> None:
    state = packed(scheduled(0, 2)).state_dict(0, True)
    other = scheduled(2, 0)
    other.train_loader.prefetch_factor = 7
    other.max_duration = "9000tok"
    again = packed(other)
    again.load_state_dict(state)
    assert again.is_loaded
    assert not again.is_restarted


def test_changed_data_is_read_from_its_start_only_if_the_user_asks_for_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = packed(scheduled())
    assert isinstance(first.batches, Lockstep)
    undisturbed = list(itertools.islice(first.batches, 4))
    state = first.state_dict(0, True)
    first.batches.close()

    same = packed(scheduled(), restart_changed=True)
    same.load_state_dict(state)
    assert not same.is_restarted

    other = packed(scheduled(), data="b", restart_changed=True)
    other.load_state_dict(copy.deepcopy(state))
    assert other.is_restarted
    assert "the data is read from its start: data was a, is b" in caplog.text
    assert isinstance(other.batches, Lockstep)
    again = list(itertools.islice(other.batches, 4))
    other.batches.close()
    assert_same(again, undisturbed)


def test_the_fingerprint_of_documents_follows_their_content() -> None:
    documents = documents_of(60)
    same, other = documents_of(60), documents_of(60)
    other._tokens[7] += 1
    assert documents.fingerprint == same.fingerprint
    assert documents.fingerprint != other.fingerprint
    assert documents.fingerprint != documents_of(59).fingerprint


def test_every_source_has_a_fingerprint_of_its_own(opened: dict[str, TrainingData]) -> None:
    found = {kind: opened[kind].train.documents.fingerprint for kind in KINDS}
    assert all(len(fingerprint) == 16 for fingerprint in found.values())
    assert found["mds"] != found["mds of ModernBERT"]
    assert found["local stream"] != found["two streams"]
    assert opened["mds"].train.documents.fingerprint != opened["mds"].val.documents.fingerprint


def test_iterating_over_packed_data_leaves_the_global_random_numbers_alone() -> None:
    loader = packed_dataspec(made(config_of())).dataloader
    before = torch.get_rng_state()
    iterator: Iterator[Batch] = iter(loader)
    next(iterator)
    assert torch.equal(torch.get_rng_state(), before)
    loader.dataset.batches.close()


def test_masks_of_a_document_do_not_depend_on_where_a_run_was_stopped() -> None:
    undisturbed, states = taken(made(scheduled()), range(2))
    again = made(scheduled())
    again.load_state_dict(states[5])
    rest, _ = taken(again, range(states[5]["epoch"], 2))
    of = [sorted(masked_documents([batch for _, batch in some])) for some in (undisturbed[5:], rest)]
    assert of[0] == of[1]
