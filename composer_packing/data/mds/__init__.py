"""Documents in MDS shards on this machine.

- `shards`: reads the index of a folder, checks each shard against it, and maps the shard into memory.
- `column`: reads many values of one column in one call, as bytes.
- `documents`: the dataset of a split. Makes token ids of the bytes, and checks that the tokenizer knows all ids.
"""
