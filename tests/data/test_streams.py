import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.storage.download import LocalDownloader
from streaming.base.util import merge_index

from composer_packing.common.errors import ConfigError
from composer_packing.config.sources import DataConfig, StreamConfig, StreamingConfig
from composer_packing.data.document_loader import DocumentLoader
from composer_packing.data.open_source import open_source
from composer_packing.data.share_sampler import ALL, Deal
from composer_packing.data.streams.documents import StreamedDocuments, Wanted
from composer_packing.data.streams.index import fetched_beside, open_streams
from composer_packing.data.streams.sampler import StreamSampler, WantedBatches
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, train_tokenizer
from tests.tools import ROOT
from tests.tools.written_sources import TEXTS, VOCAB_SIZE, run_over, write_mds


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(fast_tokenizer(train_tokenizer(TEXTS, VOCAB_SIZE)))


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three streams; document `n` of all of them is the id `n + 5`, some times over."""
    folder, number = tmp_path_factory.mktemp("remote"), 5
    for name, count in (("a", 100), ("b", 60), ("c", 7)):
        samples = [{"input_ids": np.full(1 + n % 20, n, np.uint16)} for n in range(number, number + count)]
        for split in ("train", "val"):
            write_mds(folder / name / split, {"input_ids": "ndarray:uint16"}, samples, compression="zstd")
        number += count
    return folder


def opened(
    remote: Path, cache: Path, tokenizer: TextTokenizer, cache_limit: str | None = None, **streams: StreamConfig
) -> StreamedDocuments:
    for name, stream in streams.items():
        stream.remote = stream.remote or str(remote / name)
    settings = StreamingConfig(streams=streams, cache_limit=cache_limit)
    return StreamedDocuments(open_streams(settings, "train", cache, 17), settings, tokenizer)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 1), (2, 2), (3, 3), (4, 2), (8, 2)])
def test_ranks_share_an_epoch_without_a_document_missing_or_twice(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, num_ranks: int, ranks_per_node: int
) -> None:
    documents = opened(remote, tmp_path, tokenizer, a=StreamConfig(), b=StreamConfig(), c=StreamConfig())
    samplers = [StreamSampler(documents, num_ranks, rank, ranks_per_node, seed=3) for rank in range(num_ranks)]
    totals, orders = np.zeros(num_ranks, np.int64), []
    for epoch in range(6):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [sampler.numbers() for sampler in samplers]
        assert sorted(np.concatenate(parts).tolist()) == list(range(167))
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
        totals += [len(part) for part in parts]
        orders.append(tuple(np.concatenate(parts).tolist()))
    assert len(set(orders)) == 6
    assert totals.max() - totals.min() <= 6 * (num_ranks > ranks_per_node) + 1


@given(st.integers(1, 4), st.integers(0, 50), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_an_epoch_has_of_each_stream_what_is_asked_for(
    remote: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: TextTokenizer,
    ranks: int,
    epoch: int,
    seed: int,
    repeat: float,
) -> None:
    cache = tmp_path_factory.getbasetemp() / "asked"
    of_a, of_b = StreamConfig(choose=37), StreamConfig(repeat=repeat)
    documents = opened(remote, cache, tokenizer, a=of_a, b=of_b, c=StreamConfig())
    parts = []
    for rank in range(ranks):
        sampler = StreamSampler(documents, ranks, rank, ranks, seed)
        sampler.set_epoch(epoch)
        parts.append(sampler.numbers())
    counts = Counter(np.concatenate(parts).tolist())
    a, b, c = ([counts[n] for n in numbers] for numbers in (range(100), range(100, 160), range(160, 167)))
    assert (sum(a), sum(b), sum(c)) == (37, int(60 * repeat), 7)
    assert max(a) == max(c) == 1
    assert max(b) - min(b) <= 1


@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 2)), ((4, 2), (1, 1)), ((4, 2), (4, 4)), ((1, 1), (6, 3))])
def test_what_is_left_of_an_epoch_comes_once_on_other_ranks_and_nodes(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Ranks and ranks of a node, before and after; each has read another number of documents."""
    documents = opened(remote, tmp_path, tokenizer, a=StreamConfig(choose=70), b=StreamConfig())

    def dealt(ranks: int, ranks_per_node: int, deals: dict[int, list[Deal]], epoch: int) -> list[NDArray[np.int64]]:
        samplers = [StreamSampler(documents, ranks, rank, ranks_per_node, seed=3) for rank in range(ranks)]
        for sampler in samplers:
            sampler.deals = deals
            sampler.set_epoch(epoch)
        return [sampler.numbers() for sampler in samplers]

    for epoch in range(2):
        first = dealt(*before, {}, epoch)
        read = [7 * rank % 11 for rank in range(before[0])]
        deals = {epoch: [Deal(before[1], tuple(read))]}
        second = dealt(*after, deals, epoch)
        given = [share[:count] for share, count in zip(first, read, strict=True)]
        assert Counter(np.concatenate([*given, *second]).tolist()) == Counter(np.concatenate(first).tolist())
        deals[epoch].append(Deal(after[1], (ALL, *[0] * (after[0] - 1))))
        third = dealt(*before, deals, epoch)
        assert Counter(np.concatenate([*given, second[0], *third]).tolist()) == Counter(np.concatenate(first).tolist())


def test_proportions_are_shares_of_an_epoch_as_long_as_all_streams(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    documents = opened(remote, tmp_path, tokenizer, a=StreamConfig(proportion=1.0), b=StreamConfig(proportion=3.0))
    numbers = StreamSampler(documents, 1, 0, 1, seed=3).numbers()
    assert len(numbers) == 160
    assert (numbers >= 100).sum() == 120


def test_shards_are_downloaded_when_they_are_wanted_and_ahead(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    documents = opened(remote, tmp_path, tokenizer, a=StreamConfig())
    folder = next(tmp_path.glob("stream-*")) / "train"
    assert not list(folder.glob("*.mds")), "nothing is downloaded when the index is read"
    batch = documents.__getitems__([0])
    assert batch.tokens.tolist() == [5] * len(batch.tokens)
    assert [path.name for path in folder.glob("*.mds")] == ["shard.00000.mds"]
    documents.__getitems__(Wanted(np.array([1]), np.array([2])))
    deadline = time.monotonic() + 60
    while not (folder / "shard.00002.mds").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_more_lies_on_disk_than_may_and_every_document_is_read_all_the_same(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    documents = opened(remote, tmp_path, tokenizer, "5kb", a=StreamConfig(), b=StreamConfig())
    sampler = StreamSampler(documents, 1, 0, 1, seed=3)
    seen = []
    for batch in DocumentLoader(documents, sampler, WantedBatches(sampler, documents, 8), 2, 2):
        seen += [n - 5 for n in np.unique(batch.tokens).tolist()]
    assert sorted(seen) == list(range(160))
    documents.__getitems__([0])
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.mds")]
    assert sum(sizes) <= 5 * 1024 + 2 * max(sizes), "the limit, and what two workers were at when they ended"


def test_a_shard_that_others_always_remove_is_an_error_and_not_a_wait(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = opened(remote, tmp_path, tokenizer, a=StreamConfig())
    prepare_shard = Stream.prepare_shard

    def removed_at_once(stream: Any, shard: Any) -> None:
        prepare_shard(stream, shard)
        Path(shard.dirname, shard.split, shard.file_pairs[0][0].basename).unlink()

    monkeypatch.setattr(Stream, "prepare_shard", removed_at_once)
    with pytest.raises(ValueError, match=r"data\.streaming\.cache_limit=None: is too little; .*shard.* is gone before"):
        documents.__getitems__([0])


def test_half_a_download_is_never_taken_for_a_shard(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some storages are written to the very name that is read, and a run may be killed meanwhile."""
    documents, whole = opened(remote, tmp_path, tokenizer, a=StreamConfig()), LocalDownloader._download_file_impl

    def half(self: Any, remote: str, local: str, timeout: float) -> None:
        Path(local).write_bytes(Path(remote).read_bytes()[:20])
        raise ConnectionError("the line went dead")

    monkeypatch.setattr(LocalDownloader, "_download_file_impl", half)
    with pytest.raises(ValueError, match=r"cannot be fetched \(ConnectionError: the line went dead"):
        documents.__getitems__([0])
    assert not [path for path in tmp_path.rglob("shard*") if path.suffix not in (".part", ".lock")]
    monkeypatch.setattr(LocalDownloader, "_download_file_impl", whole)
    assert set(documents.__getitems__([0]).tokens.tolist()) == {5}


def test_streams_whose_index_was_merged_of_several_are_read(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    for split in ("train", "val"):
        for part, name in enumerate("abc"):
            shutil.copytree(remote / name / split, tmp_path / "merged" / split / str(part))
        merge_index(str(tmp_path / "merged" / split))
    local = StreamConfig(local=str(tmp_path / "merged"))
    settings = StreamingConfig(streams={"all": local})
    documents = StreamedDocuments(open_streams(settings, "train", tmp_path, 17), settings, tokenizer)
    assert np.unique(documents.__getitems__(np.arange(167)).tokens).tolist() == list(range(5, 172))
    fetched = opened(remote, tmp_path / "cache", tokenizer, all=StreamConfig(remote=str(tmp_path / "merged")))
    assert np.unique(fetched.__getitems__(np.arange(167)).tokens).tolist() == list(range(5, 172))


def test_opening_reads_the_first_shard_of_each_stream_and_weighs_them_as_they_are_weighted(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    for name, length in (("short", 10), ("long", 100)):
        samples = [{"input_ids": np.full(length, 7, np.uint16)}] * 30
        for split in ("train", "val"):
            write_mds(tmp_path / "remote" / name / split, {"input_ids": "ndarray:uint16"}, samples, size_limit=1)
    tokenizer.save(tmp_path / "remote" / "short" / "tokenizer")
    streams = {
        name: StreamConfig(remote=f"{tmp_path}/remote/{name}", proportion=proportion)
        for name, proportion in (("short", 9.0), ("long", 1.0))
    }
    data = DataConfig(str(tmp_path / "cache"), streaming=StreamingConfig(streams=streams))
    source = open_source(run_over(data))
    assert len(list((tmp_path / "cache").rglob("train/*.mds"))) == 2
    assert source.train.per_epoch == 60
    assert source.train.num_tokens == 54 * 10 + 6 * 100
    assert source.val.num_tokens == 30 * 110


def test_data_that_was_written_anew_is_not_mixed_with_what_is_here(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    shutil.copytree(remote / "a", tmp_path / "a")
    for _ in range(2):
        stream = StreamConfig(remote=str(tmp_path / "a"))
        opened(remote, tmp_path / "cache", tokenizer, a=stream).__getitems__([0])
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(remote / "b", tmp_path / "a")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a/train: has been written anew since shards of it were downloaded to"):
            opened(remote, tmp_path / "cache", tokenizer, a=StreamConfig(remote=str(tmp_path / "a")))
    shutil.rmtree(tmp_path / "cache")
    assert len(opened(remote, tmp_path / "cache", tokenizer, a=StreamConfig(remote=str(tmp_path / "a")))) == 60


def test_a_storage_that_does_not_answer_is_not_taken_for_one_without_counts(
    remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamConfig(remote=str(remote / "a"))
    assert fetched_beside(stream, "stats.json", tmp_path) is None

    def refused(self: Any, remote: str, local: str, timeout: float) -> None:
        raise PermissionError(13, "Access denied")

    monkeypatch.setattr(LocalDownloader, "_download_file_impl", refused)
    with pytest.raises(ConfigError, match=r"a/stats\.json: cannot be read \(PermissionError: .*Access denied"):
        fetched_beside(stream, "stats.json", tmp_path)


def test_a_shard_that_cannot_be_fetched_is_named_in_the_main_process(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    lost = tmp_path / "lost"
    subprocess.run(["cp", "-r", str(remote / "a"), str(lost)], check=True)
    documents = opened(remote, tmp_path / "cache", tokenizer, a=StreamConfig(remote=str(lost)))
    for path in (lost / "train").glob("shard.00001*"):
        path.unlink()
    sampler = StreamSampler(documents, 1, 0, 1, seed=3)
    loader = DocumentLoader(documents, sampler, WantedBatches(sampler, documents, 8), 1, 2)
    with pytest.raises(ValueError, match=r"lost/train/shard\.00001\.mds: cannot be fetched \(FileNotFoundError"):
        list(loader)


def test_a_damaged_shard_is_named(remote: Path, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    documents = opened(remote, tmp_path, tokenizer, a=StreamConfig())
    documents.__getitems__([0])
    (path,) = tmp_path.rglob("*.mds")
    data = bytearray(path.read_bytes())
    data[4:12] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard\.00000\.mds: sample 0 cannot be read"):
        documents.__getitems__([0])


READ_AND_WAIT = """
    import sys, time
    from pathlib import Path
    from composer_packing.config.sources import StreamConfig
    from tests.data.test_streams import opened, StreamSampler, WantedBatches, DocumentLoader
    from composer_packing.data.tokenizer import load_tokenizer

    remote, cache, tokenizer, waits = sys.argv[1:]
    documents = opened(Path(remote), Path(cache), load_tokenizer(tokenizer), a=StreamConfig(), b=StreamConfig())
    sampler = StreamSampler(documents, 1, 0, 1, seed=3)
    loader = DocumentLoader(documents, sampler, WantedBatches(sampler, documents, 8), 2, 2)
    seen = 0
    for number, batch in enumerate(loader):
        seen += len(batch.lengths)
        if number == 1:
            print("reading", flush=True)
            time.sleep(float(waits))
    print(seen, flush=True)
"""


@pytest.mark.slow
def test_crashed_runs_and_others_at_the_same_time_do_not_stop_a_run(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    arguments = [str(remote), str(tmp_path / "cache"), str(tmp_path / "tokenizer")]
    command = [sys.executable, "-c", textwrap.dedent(READ_AND_WAIT), *arguments]
    shared = set(os.listdir("/dev/shm"))

    def started(waits: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, waits], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        return process

    crashed = started("600")
    os.killpg(crashed.pid, signal.SIGKILL)
    crashed.wait(60)
    both = [started("1"), started("0")]
    for process in both:
        out, _ = process.communicate(timeout=120)
        assert out == "160\n"
        assert process.returncode == 0
    assert set(os.listdir("/dev/shm")) <= shared, "nothing of the streams lies in shared memory"
