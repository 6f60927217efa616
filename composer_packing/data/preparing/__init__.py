"""From files of any format to MDS shards::

    files --reading--> records --chunks--> processes: texts, tokens --in_order--> shard_writer

`write_shards` puts these together.
"""
