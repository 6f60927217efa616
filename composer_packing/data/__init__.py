"""From the data that a configuration names to source batches of token ids for each rank.

- `open_source`: opens the source of a run: its tokenizer, and the documents to train and to evaluate on.
- `mds` / `streams`: documents in shards on this machine / shards that are downloaded from an object store.
- `prepare`: turns files of texts or examples into shards, once; also a command.
- `docstrings`: the built-in corpus, prepared in the same way.
- `tokenizer`: makes token ids of texts. `chat_examples`: renders a chat, and says which of its tokens train.
- `share_sampler`: deals documents out to ranks for an epoch. `streams.sampler` does so by node.
- `document_loader`: reads a rank's documents as source batches, in worker processes if asked; saves the position.
"""
