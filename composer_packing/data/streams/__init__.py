"""Documents in MDS shards in object storage, downloaded while training by mosaicml-streaming.

- `index`: opens the streams of a split: reads the index of each, and finds its shards.
- `sampler`: says which documents a rank reads in an epoch, and deals them out by node and rank.
- `documents`: the dataset of a split. Reads samples, and makes token ids of them.
- `shard_cache`: fetches shards when they are needed or before, on threads, and removes shards to keep a limit on disk.
- `shard`: fetches, unpacks and checks one shard, under a file lock.
- `download`: downloads files so that a file is complete or missing; knows where a stream's local folder is.
"""
