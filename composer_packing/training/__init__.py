"""Training: the parts that Composer is given, and what a run prints.

`run` builds the parts of a run, fits, and says what happened. `batches` packs the training documents, `evaluation` the
held-out ones. `dataspec` wraps batches for Composer, `composer_model` wraps the encoder, and `optimizer` sets the
learning rate. `monitor` logs what each batch held. `console` prints while a run trains, and `report` words the lines at
its start and end.
"""
