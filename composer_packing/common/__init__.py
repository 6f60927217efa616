"""What every room uses and what knows nothing of packing.

`errors` (one line that a user can act on), `arguments` (checks of arguments), `durations` (`1000tok`, `0.1dur`),
`snapshots` (the verbs of saved state), `jit` (how functions are compiled), `folders` (built once, whole or not at all)
and `processes` (how a rank starts and ends).

Imports neither PyTorch nor Composer.
"""
