"""MDS shards in object storage, through mosaicml-streaming.

`index` opens the streams, `shard` fetches one shard, `documents` reads documents, and `sampler` says which documents a
rank reads in an epoch.
"""
