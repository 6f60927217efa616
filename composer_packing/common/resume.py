"""Which keys of a configuration may change when a run resumes from a checkpoint. Every key declares it where it stands.

A run resumes with its own optimizer and its own position in the data. Or it starts from the weights of a checkpoint
only, with `load_weights_only=true`; then the optimizer and the data start from the beginning.
"""

import dataclasses
import enum
from typing import TypeVar, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


class Resume(enum.Enum):
    """What must hold for the value of a key when a run resumes."""

    BATCHES = enum.auto()
    """The value must match, as other batches would follow from another one. `restart_changed_data=true` allows another
    value and reads the data from its start."""

    WEIGHTS = enum.auto()
    """The value must match, also if only the weights are taken: they mean nothing in a model of another shape."""

    TRAINING = enum.auto()
    """The value must match, as the training would continue in another way. It may differ if only the weights are
    taken."""

    FINGERPRINT = enum.auto()
    """The value may differ, such as a path. The documents and the tokenizer to which it leads must match: checkpoints
    hold a fingerprint of each."""

    FREE = enum.auto()
    """The value may differ."""


def key(default: Value, resume: Resume) -> Value:
    """Return the field of a dataclass with this default, and with the declaration of what may change."""
    field: Value = dataclasses.field(default=default, metadata={Resume: resume})
    return field


def declared_keys(schema: type) -> dict[str, Resume]:
    """Return what each key declares, in the order of the fields.

    Args:
        schema: a dataclass. Keys of a dataclass within it are named with dots, as `optimizer.lr`. A dataclass in a dict
            has `NAME` for its key, as `streams.NAME.remote`.

    Raises:
        TypeError: a key declares nothing.
    """
    kinds = get_type_hints(schema)
    declared: dict[str, Resume] = {}
    for field in dataclasses.fields(schema):
        kind = kinds[field.name]
        nested = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and dataclasses.is_dataclass(part)]
        if nested:
            prefix = f"{field.name}.NAME" if get_origin(kind) is dict else field.name
            declared |= {f"{prefix}.{name}": resume for name, resume in declared_keys(nested[0]).items()}
        elif Resume in field.metadata:
            declared[field.name] = field.metadata[Resume]
        else:
            raise TypeError(f"{schema.__name__}.{field.name} does not declare what may change when a run resumes")
    return declared


def keys_that_are(schema: type, *wanted: Resume) -> list[str]:
    """Return the keys of a dataclass that declare one of these, in the order of the fields."""
    return [name for name, resume in declared_keys(schema).items() if resume in wanted]
