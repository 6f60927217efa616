"""From text files of any format to MDS shards, once::

    files --records--> records --tokenize_records--> tokens --ordered_pool--> shard_writer

`pipeline` runs these steps, and `command` is `python -m composer_packing.prepare`. `text_cache` makes shards of text
for sources that are tokenized while training. `stats` reads what lies beside prepared shards.
"""
