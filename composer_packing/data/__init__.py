"""The data: from files, shards or streams to source batches of token ids, for each rank.

`open_source` turns the source of a YAML file into a tokenizer and two splits. Documents lie in shards on this machine
(`mds`), in shards elsewhere (`streams`), or in text files that are copied or tokenized into shards once (`prepare`,
which is also a command). `docstrings` is the built-in corpus, prepared in the same way. `tokenizer` and
`chat_examples` turn texts and chats into ids. `share_sampler` deals documents out to ranks and `document_loader`
reads them, in worker processes if asked.
"""
