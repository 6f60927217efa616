"""What every room uses: errors, checks, durations, saved state, file locks and processes.

Functions here take and return plain Python values. They know nothing of packing and import no PyTorch.

- `errors`: the error that a user can fix, and any value as one line of text.
- `arguments`: checks of arguments that name the argument and show its value.
- `durations`: durations such as `1000tok` or `0.1dur`, and the table of their units.
- `snapshots`, `redealing`: how every stage saves its state, resumes from it, and deals it out to other ranks.
- `resume`: how each key of the configuration declares whether it may change when a run resumes.
- `jit`: how the functions that move tokens are compiled.
- `folders`: folders that are built once and appear whole or not at all, and file locks.
- `processes`: how a process obeys its parent, and how it ends with the right exit code.
"""
