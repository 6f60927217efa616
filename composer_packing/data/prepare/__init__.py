"""From files of any format to MDS shards, once::

    files --records--> raw records --tokenize_records--> documents --ordered_pool--> shard_writer

`pipeline` runs these steps, and `command` is `python -m composer_packing.prepare`. `files` finds the files, and
`record_text` finds the text or the example in a record. `tokenizer_sample` reads texts to train a tokenizer on.
`text_cache` makes shards of text for sources that are tokenized while training. `stats` reads the counts and the
tokenizer next to prepared shards.
"""
