"""What every room uses. Nothing here knows of packing or imports PyTorch.

- `errors`: the error that a user can fix, and any value as one line of text.
- `arguments`: checks of arguments that name the argument and show its value.
- `durations`: durations such as `1000tok` or `0.1dur`, and the table of their units.
- `snapshots`, `redealing`, `resume`: how a stage saves its state, resumes, and deals its state out to other ranks;
  which keys of the configuration may change then.
- `jit`: how the functions that move tokens are compiled.
- `addresses`: paths on this machine and addresses in an object store.
- `folders`: folders that are built once and appear whole or not at all, and file locks.
- `processes`: how a process obeys its parent, and how it ends with the right exit code.
"""
