from hypothesis import given
from hypothesis import strategies as st

from composer_packing.data.share_sampler import ShareSampler


def shares(count: int, world_size: int, epoch: int, seed: int = 3) -> list[list[int]]:
    samplers = [ShareSampler(range(count), world_size, rank, seed) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    found = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in found]
    return found


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 20))
def test_every_document_goes_to_one_rank_once_an_epoch(count: int, world_size: int, epoch: int) -> None:
    dealt = shares(count, world_size, epoch)
    assert sorted(number for share in dealt for number in share) == list(range(count))
    assert all(type(number) is int for share in dealt for number in share)


@given(st.integers(1, 30), st.integers(1, 9))
def test_in_as_many_epochs_as_ranks_every_rank_gets_the_same_number_of_documents(count: int, world_size: int) -> None:
    dealt = [
        sum(len(share) for share in ranks)
        for ranks in zip(*(shares(count, world_size, e) for e in range(world_size)), strict=True)
    ]
    assert dealt == [count] * world_size


def test_the_order_does_not_depend_on_the_number_of_ranks_but_on_epoch_and_seed() -> None:
    (alone,) = shares(50, 1, epoch=0)
    first, second = shares(50, 2, epoch=0)
    assert alone[::2] == first
    assert alone[1::2] == second
    orders = [shares(50, 1, epoch, seed)[0] for epoch in (0, 1) for seed in (3, 4)]
    assert len({tuple(order) for order in orders}) == 4
    assert alone != sorted(alone)


def test_an_epoch_begins_with_the_rank_after_the_last_of_the_epoch_before() -> None:
    assert [[len(share) for share in shares(5, 2, epoch)] for epoch in range(3)] == [[3, 2], [2, 3], [3, 2]]
    assert [[len(share) for share in shares(1, 3, epoch)] for epoch in range(4)] == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
        [1, 0, 0],
    ]
