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
from composer_packing.data.share_sampler import WHOLE_SHARE, EarlierDeal
from composer_packing.data.streams.documents import StreamedDocuments, StreamRequest
from composer_packing.data.streams.download import fetch_stream_file
from composer_packing.data.streams.index import open_streams
from composer_packing.data.streams.sampler import StreamSampler
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, train_tokenizer
from tests.tools import ROOT
from tests.tools.written_sources import TEXTS, VOCAB_SIZE, run_over, write_mds


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(fast_tokenizer(train_tokenizer(TEXTS, VOCAB_SIZE)))


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three streams. Document `n`, counted over all streams, holds the id `n + 5`, a number of times."""
    folder, number = tmp_path_factory.mktemp("remote"), 5
    for name, count in (("a", 100), ("b", 60), ("c", 7)):
        samples = [{"input_ids": np.full(1 + n % 20, n, np.uint16)} for n in range(number, number + count)]
        for split in ("train", "val"):
            write_mds(folder / name / split, {"input_ids": "ndarray:uint16"}, samples, compression="zstd")
        number += count
    return folder


def open_documents(
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
    documents = open_documents(remote, tmp_path, tokenizer, a=StreamConfig(), b=StreamConfig(), c=StreamConfig())
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
    documents = open_documents(remote, cache, tokenizer, a=of_a, b=of_b, c=StreamConfig())
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
def test_the_rest_of_an_epoch_comes_once_on_other_ranks_and_nodes(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """`before` and `after` are ranks and ranks of a node. Each rank before has read another number of documents."""
    documents = open_documents(remote, tmp_path, tokenizer, a=StreamConfig(choose=70), b=StreamConfig())

    def deal_out(
        ranks: int, ranks_per_node: int, deals: dict[int, list[EarlierDeal]], epoch: int
    ) -> list[NDArray[np.int64]]:
        samplers = [StreamSampler(documents, ranks, rank, ranks_per_node, seed=3) for rank in range(ranks)]
        for sampler in samplers:
            sampler.deals = deals
            sampler.set_epoch(epoch)
        return [sampler.numbers() for sampler in samplers]

    for epoch in range(2):
        first = deal_out(*before, {}, epoch)
        read = [7 * rank % 11 for rank in range(before[0])]
        deals = {epoch: [EarlierDeal(before[1], tuple(read))]}
        second = deal_out(*after, deals, epoch)
        given = [share[:count] for share, count in zip(first, read, strict=True)]
        assert Counter(np.concatenate([*given, *second]).tolist()) == Counter(np.concatenate(first).tolist())
        deals[epoch].append(EarlierDeal(after[1], (WHOLE_SHARE, *[0] * (after[0] - 1))))
        third = deal_out(*before, deals, epoch)
        assert Counter(np.concatenate([*given, second[0], *third]).tolist()) == Counter(np.concatenate(first).tolist())


def test_proportions_are_shares_of_an_epoch_that_is_as_long_as_all_streams(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    documents = open_documents(
        remote, tmp_path, tokenizer, a=StreamConfig(proportion=1.0), b=StreamConfig(proportion=3.0)
    )
    numbers = StreamSampler(documents, 1, 0, 1, seed=3).numbers()
    assert len(numbers) == 160
    assert (numbers >= 100).sum() == 120


def test_shards_are_downloaded_when_they_are_needed_and_ahead(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    documents = open_documents(remote, tmp_path, tokenizer, a=StreamConfig())
    folder = next(tmp_path.glob("stream-*")) / "train"
    assert not list(folder.glob("*.mds")), "no shard is downloaded when the index is read"
    batch = documents.__getitems__([0])
    assert batch.tokens.tolist() == [5] * len(batch.tokens)
    assert [path.name for path in folder.glob("*.mds")] == ["shard.00000.mds"]
    documents.__getitems__(StreamRequest(np.array([1]), np.array([2])))
    deadline = time.monotonic() + 60
    while not (folder / "shard.00002.mds").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_more_than_the_limit_lies_on_disk_and_every_document_is_read(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    documents = open_documents(remote, tmp_path, tokenizer, "5kb", a=StreamConfig(), b=StreamConfig())
    sampler = StreamSampler(documents, 1, 0, 1, seed=3)
    seen = []
    for batch in DocumentLoader(documents, sampler, 8, 2, 2):
        seen += [n - 5 for n in np.unique(batch.tokens).tolist()]
    assert sorted(seen) == list(range(160))
    documents.__getitems__([0])
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.mds")]
    assert sum(sizes) <= 5 * 1024 + 2 * max(sizes), "the limit, and the shards that two workers held when they ended"


def test_a_shard_that_others_keep_removing_is_an_error_and_not_a_wait(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = open_documents(remote, tmp_path, tokenizer, a=StreamConfig())
    prepare_shard = Stream.prepare_shard

    def prepare_and_remove(stream: Any, shard: Any) -> None:
        prepare_shard(stream, shard)
        Path(shard.dirname, shard.split, shard.file_pairs[0][0].basename).unlink()

    monkeypatch.setattr(Stream, "prepare_shard", prepare_and_remove)
    with pytest.raises(ValueError, match=r"data\.streaming\.cache_limit=None: .*shard.* was removed 8 times before"):
        documents.__getitems__([0])


def test_half_a_download_is_never_read_as_a_shard(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some downloaders write to the name that is read, and a run may be killed meanwhile."""
    documents, whole = (
        open_documents(remote, tmp_path, tokenizer, a=StreamConfig()),
        LocalDownloader._download_file_impl,
    )

    def half(self: Any, remote: str, local: str, timeout: float) -> None:
        Path(local).write_bytes(Path(remote).read_bytes()[:20])
        raise ConnectionError("the line went dead")

    monkeypatch.setattr(LocalDownloader, "_download_file_impl", half)
    with pytest.raises(ValueError, match=r"cannot be fetched \(ConnectionError: the line went dead"):
        documents.__getitems__([0])
    assert not [path for path in tmp_path.rglob("shard*") if path.suffix not in (".part", ".lock")]
    monkeypatch.setattr(LocalDownloader, "_download_file_impl", whole)
    assert set(documents.__getitems__([0]).tokens.tolist()) == {5}


def test_streams_with_an_index_that_was_merged_from_several_are_read(
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
    fetched = open_documents(remote, tmp_path / "cache", tokenizer, all=StreamConfig(remote=str(tmp_path / "merged")))
    assert np.unique(fetched.__getitems__(np.arange(167)).tokens).tolist() == list(range(5, 172))


def test_opening_reads_the_first_shard_of_each_stream_and_weighs_its_tokens_by_the_streams_weight(
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


def test_data_that_was_written_again_is_not_mixed_with_shards_downloaded_before(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    shutil.copytree(remote / "a", tmp_path / "a")
    for _ in range(2):
        stream = StreamConfig(remote=str(tmp_path / "a"))
        open_documents(remote, tmp_path / "cache", tokenizer, a=stream).__getitems__([0])
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(remote / "b", tmp_path / "a")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a/train: was written again after shards of it were downloaded to"):
            open_documents(remote, tmp_path / "cache", tokenizer, a=StreamConfig(remote=str(tmp_path / "a")))
    shutil.rmtree(tmp_path / "cache")
    assert len(open_documents(remote, tmp_path / "cache", tokenizer, a=StreamConfig(remote=str(tmp_path / "a")))) == 60


def test_a_storage_that_refuses_a_file_is_not_taken_for_a_storage_without_the_file(
    remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamConfig(remote=str(remote / "a"))
    assert fetch_stream_file(stream, "stats.json", tmp_path) is None

    def refuse(self: Any, remote: str, local: str, timeout: float) -> None:
        raise PermissionError(13, "Access denied")

    monkeypatch.setattr(LocalDownloader, "_download_file_impl", refuse)
    with pytest.raises(ConfigError, match=r"a/stats\.json: cannot be read \(PermissionError: .*Access denied"):
        fetch_stream_file(stream, "stats.json", tmp_path)


def test_a_shard_that_a_worker_cannot_fetch_is_named_in_the_main_process(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    lost = tmp_path / "lost"
    subprocess.run(["cp", "-r", str(remote / "a"), str(lost)], check=True)
    documents = open_documents(remote, tmp_path / "cache", tokenizer, a=StreamConfig(remote=str(lost)))
    for path in (lost / "train").glob("shard.00001*"):
        path.unlink()
    sampler = StreamSampler(documents, 1, 0, 1, seed=3)
    loader = DocumentLoader(documents, sampler, 8, 1, 2)
    with pytest.raises(ValueError, match=r"lost/train/shard\.00001\.mds: cannot be fetched \(FileNotFoundError"):
        list(loader)


def test_a_damaged_shard_is_named(remote: Path, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    documents = open_documents(remote, tmp_path, tokenizer, a=StreamConfig())
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
    from tests.data.test_streams import open_documents, StreamSampler, DocumentLoader
    from composer_packing.data.tokenizer import load_tokenizer

    remote, cache, tokenizer, waits = sys.argv[1:]
    documents = open_documents(Path(remote), Path(cache), load_tokenizer(tokenizer), a=StreamConfig(), b=StreamConfig())
    sampler = StreamSampler(documents, 1, 0, 1, seed=3)
    loader = DocumentLoader(documents, sampler, 8, 2, 2)
    seen = 0
    for number, batch in enumerate(loader):
        seen += len(batch.lengths)
        if number == 1:
            print("reading", flush=True)
            time.sleep(float(waits))
    print(seen, flush=True)
"""


@pytest.mark.slow
def test_a_run_is_stopped_neither_by_crashed_runs_nor_by_runs_at_the_same_time(
    remote: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    arguments = [str(remote), str(tmp_path / "cache"), str(tmp_path / "tokenizer")]
    command = [sys.executable, "-c", textwrap.dedent(READ_AND_WAIT), *arguments]
    shared = set(os.listdir("/dev/shm"))

    def start(waits: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, waits], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        return process

    crashed = start("600")
    os.killpg(crashed.pid, signal.SIGKILL)
    crashed.wait(60)
    both = [start("1"), start("0")]
    for process in both:
        out, _ = process.communicate(timeout=120)
        assert out == "160\n"
        assert process.returncode == 0
    assert set(os.listdir("/dev/shm")) <= shared, "streams leave nothing in shared memory"
