"""The configuration of a run: every key of a YAML file, with its type, its default and its meaning.

`schema` holds the keys of a run, `sources` those of its data and `model.config` those of the model. A key declares its
range where it stands: `limits` defines the kinds of range and checks them. `loading` reads a file and `key=value`
overrides into the schema. `durations` turns shares of the training into tokens, documents or batches. `schedules` makes
the schedules of the packer, and `checks` says which values go together. `prepare` holds the settings of
`composer_packing.prepare`. Every mistake is a `ConfigError` of one line.
"""
